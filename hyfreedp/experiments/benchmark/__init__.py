"""Time and memory of one training step, of ours and of others: ``python -m hyfreedp.experiments.benchmark``.

Imports the rooms up to ``tables``.
"""
