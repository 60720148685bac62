"""Allocator traces: what was decided, recorded, and asked again of the present code."""
