"""Golden files: one small journal per released format, and the lock of the record schema."""
