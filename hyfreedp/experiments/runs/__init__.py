"""One training run: its spec, its method, the training, its record; and the pre-training of public weights.

Imports ``store``, ``data``, ``models``, ``tasks`` and ``baselines``.
"""
