"""Tests that hold the repository itself to its rules: layering, sizes, banned calls, documents, locks."""
