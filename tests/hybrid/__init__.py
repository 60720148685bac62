"""Tests of core, worker and modeled memory together, over every kind of band."""
