"""Small-scope exhaustion: every sequence of actions on tiny arenas, on real chains over symbolic devices."""
