"""Tests of the HTTP front end, against a double of the daemon's client."""
