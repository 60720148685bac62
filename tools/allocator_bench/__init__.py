"""`bandmaster bench allocator`: both chains of the allocator on serving traces and in chosen layouts, timed apart."""
