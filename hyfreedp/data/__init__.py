"""Poisson sampling of records, and the batches that a private step takes."""
