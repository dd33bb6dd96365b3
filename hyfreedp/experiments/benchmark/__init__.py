"""Time and memory of a training step, by several libraries: ``python -m hyfreedp.experiments.benchmark``."""
