"""Distillation: makes a draft head for any verifier the engine loads. Offline work; the engine knows nothing of it."""
