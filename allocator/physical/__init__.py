"""The physical chain: where every unit lies on one rank, and the effects that put it there."""
