"""A verifier over several devices: rank 0 is the engine, every other rank a process with a shard of the model."""
