"""Recurrent layers: the mixers of `transformers` models over ragged batches, their state in the arena's slots."""
