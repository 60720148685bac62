"""Scenario files: what the scheduler decides in small worlds that are told what to do, word for word."""
