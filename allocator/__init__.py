"""The allocator: one arena per rank shared by every kind of per-request memory; pure decisions and pure layouts."""
