"""The simulator: the engine's policies and books on a manual clock, without torch."""
