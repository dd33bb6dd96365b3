"""Data, models and a training protocol, with their scores, by name."""
