"""`bandmaster faults`: processes of a running server are killed, stopped and led astray; what clients get is judged."""
