"""Tensor parallelism: which part of each weight a rank holds, and the collectives that make the parts one model."""
