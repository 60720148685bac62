"""What-if: the arrivals of a recorded run with other settings, predicted by the real core and held against real runs."""
