"""`bandmaster accounts`: what became of all requests, counted three times: by the journal, the log and the metrics."""
