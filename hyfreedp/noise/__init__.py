"""Noise: a keyed stream of exact normal numbers, and the cipher under it."""

from hyfreedp.noise.stream import NoiseGenerator, as_generator

__all__ = ["NoiseGenerator", "as_generator"]
