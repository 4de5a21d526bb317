"""Policies: what the next step runs. Numbers in, plan out; no torch, no clock, no logging."""
