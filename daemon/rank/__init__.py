"""Rank processes: the step loop, the executor over the arena, the model and its sampler."""
