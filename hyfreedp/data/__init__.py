"""Poisson sampling of records, and the batches that a step takes."""
