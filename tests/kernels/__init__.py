"""Tests of the kernels against their torch twins, and of the twins against plain definitions."""
