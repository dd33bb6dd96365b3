"""Baselines for the tables that are not part of the core: adaptive clipping."""
