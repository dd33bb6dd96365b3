"""One training run: its spec, its method, the training, its record.

Imports ``store``, ``data``, ``models``, ``tasks`` and ``baselines``.
"""
