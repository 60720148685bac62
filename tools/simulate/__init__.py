"""`bandmaster simulate`: the real core on a trace of traffic, without a model."""
