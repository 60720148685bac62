"""The storage plan of a model from its config alone: stages, prices of requests and of workloads, and their tables."""
