"""Tests of the ipc room."""
