"""Tests of the rank process: rows, batches, executor, runners, models, the loop."""
