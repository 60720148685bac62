"""The page-safety harness: random scheduler-level programs on every rank's real chain over modeled devices."""
