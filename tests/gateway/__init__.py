"""Tests of the gateway actor."""
