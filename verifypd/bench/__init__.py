"""Measuring and showing: what needs more than the engine does. Packages of the `bench` extra are imported late."""
