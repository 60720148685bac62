"""The daemon: its shell here, the pure core in `core`, ranks in `rank`, HTTP front ends in `frontend`."""
