"""A simulated world around the daemon's own shell: its clients, ranks, disk and deaths, on a clock that jumps."""
