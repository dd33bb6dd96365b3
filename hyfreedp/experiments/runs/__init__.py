"""One training run: its spec, its method, the training, its record."""
