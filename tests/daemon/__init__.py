"""Tests of the daemon's shell: settings, engine, results, supervision, health, observation, processes."""
