"""Batches: Poisson samples of the records, and what they are made of."""
