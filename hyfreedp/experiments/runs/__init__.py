"""Training runs: a run's spec, its method, its training and its record."""
