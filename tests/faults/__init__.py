"""Tests of the fault campaign's own parts: its plan, its clients' books, its monitor and its verdicts."""
