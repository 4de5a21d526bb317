"""Sampling and verification: noise, transforms, verdicts, drafting, logprobs. Pure tensor work, no host sync."""
