"""Counts of what the engine did."""
