"""Time and memory of one training step: plain, by Opacus, by this package; ``python -m hyfreedp.experiments.benchmark``."""
