"""Planted faults: journals in which exactly one thing is false, and what replay must name."""
