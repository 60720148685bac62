"""The logical chain: what the daemon decides from counts, and the mirror that ranks check it with."""
