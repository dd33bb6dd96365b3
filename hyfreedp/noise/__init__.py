"""Noise: Gaussian numbers from a keyed stream, and the cipher under it."""

from hyfreedp.noise.stream import NoiseGenerator, as_generator

__all__ = ["NoiseGenerator", "as_generator"]
