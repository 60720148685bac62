"""Pressure: what the core keeps, retracts and computes again when memory is short, measured without a model."""
