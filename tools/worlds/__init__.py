"""Simulated worlds around the scheduler core: random ones that are judged and made smaller, and scripted ones."""
