"""Hits: what later requests find of earlier ones, and what the checkpoints for it cost, measured without a model."""
