"""Many cancels at once beside streams that go on: who asks, who is answered, and what the journal has of it."""
