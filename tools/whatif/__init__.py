"""What-if: a recorded run's arrivals under other settings, predicted by the real core and beside real runs."""
