"""`bandmaster top`: a live view of a running daemon in the terminal."""
