"""Tests of the commands that measure and compare: their arithmetic and their judgements, without a server."""
