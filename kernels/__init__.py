"""Kernels: Triton ops for GPUs, each beside its torch twin. Stays light: importing it imports nothing.

The version below is read by `transformers`, which probes for a foreign package of this name; it must stay outside the
range that would make it use ours (a test checks that it does not).
"""

__version__ = "0"
