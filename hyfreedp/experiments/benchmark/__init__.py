"""Time and memory of one training step, of ours and of others: ``python -m hyfreedp.experiments.benchmark``."""
