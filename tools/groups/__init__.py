"""Simulated groups: a real core, and the real step workers of every stage and tensor rank, in one thread."""
