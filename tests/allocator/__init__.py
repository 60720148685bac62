"""Tests of the allocator."""
