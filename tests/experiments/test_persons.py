"""The study of persons: its features by hand."""

import numpy as np
import torch

from hyfreedp.experiments.studies import persons


def test_a_slope_of_brightness_has_one_direction():
    """Of -4, ..., 3: brighter to the right is 0, downwards 2, to the left -4."""
    ramp = np.broadcast_to(np.arange(0, 256, 8, dtype=np.uint8), (32, 32))
    images = np.stack([ramp, ramp.T, ramp[:, ::-1]])[..., None].repeat(3, axis=3)
    found = persons.features(images).unflatten(1, (8, 36))
    torch.testing.assert_close(found.norm(dim=(1, 2)), torch.full((3,), 10.0))
    weights = found[..., 0]
    assert weights.argmax(1).tolist() == [4, 6, 0]
    torch.testing.assert_close(weights.max(1).values, torch.full((3,), 10 / 6), rtol=1e-3, atol=0)  # of 36 cells
