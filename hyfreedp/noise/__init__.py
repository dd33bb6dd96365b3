"""Gaussian noise from a keyed stream, the cipher under it, and the global random states."""

from hyfreedp.noise.stream import NoiseGenerator, as_generator

__all__ = ["NoiseGenerator", "as_generator"]
