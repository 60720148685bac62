"""Tests of the scheduler core: a simulated world around it, and each rule on its own."""
