"""`bandmaster export`: a journal in formats that other tools read."""
