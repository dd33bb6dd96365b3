"""Data, models and a training protocol, with their scores, by name.

Imports ``store``, ``data`` and ``models``.
"""
