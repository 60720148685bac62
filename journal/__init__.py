"""The journal: the daemon's write-ahead log and flight recorder, its recovery and its replay."""
