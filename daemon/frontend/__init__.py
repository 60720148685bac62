"""The HTTP front end: OpenAI-compatible routes over the daemon's client; it imports no tensor library."""
