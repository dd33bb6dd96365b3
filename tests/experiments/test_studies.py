"""The studies: losses along a run's direction are those that it saw; thresholds and features by another computation."""

import itertools
from functools import partialmethod

import numpy as np
import pytest
import torch
from scipy import optimize

from hyfreedp import PrivacyEngine, normal_clipping_bias
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.train import make_run
from hyfreedp.experiments.studies import bias_variance, landscape, persons
from hyfreedp.experiments.tasks.scores import losses_of

SPEC = {"method": "paper", "learning_rate": 0.05, "epsilon": 2.0, "interval": 1, "steps": 4, "seed": 0}


@pytest.fixture(scope="module")
def seen():
    """The first records of the run, with the raw losses that its own probes saw."""
    with pytest.MonkeyPatch.context() as patch:
        telling = partialmethod(PrivacyEngine.make_private_with_epsilon, diagnostics=True)
        patch.setattr(PrivacyEngine, "make_private_with_epsilon", telling)
        optimizer, loader = make_run(Spec(**SPEC))
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    per_sample_loss = losses_of(optimizer.module)
    return [(optimizer.step(per_sample_loss, batch), len(batch[1])) for batch in itertools.islice(batches, 3)]


def test_probed_losses_are_those_that_the_run_saw_and_leave_no_trace(seen):
    """The rate moves at every probe, and one looks at the old rate: reach h / eta, along the same direction."""
    probed = landscape.probed_losses(spec=SPEC, stages=[0, 2], brightness=16.0)
    for step in (0, 2):
        record, size = seen[step]
        mine = landscape.losses_of(probed, step, "batch")
        assert mine.shape == (3, size) and landscape.distance_of(probed, step) == pytest.approx(record.eta, rel=1e-12)
        assert mine[1].mean() == pytest.approx(record.diagnostics["loss_here"], abs=2e-6)
        if record.probe.eta_next == record.probe.eta_probed:
            assert mine[0].mean() == pytest.approx(record.diagnostics["loss_ahead"], abs=2e-6)
            assert mine[2].mean() == pytest.approx(record.diagnostics["loss_behind"], abs=2e-6)


@pytest.mark.parametrize(("batch_size", "golden"), [(50, 1.614), (5000, 2.818)])
def test_the_best_threshold_is_the_lowest_point_of_the_error(batch_size, golden):
    def error(threshold):
        return np.hypot(normal_clipping_bias(threshold, 2.0, 0.4), 23.2845 * threshold / batch_size)

    lowest = optimize.minimize_scalar(error, bounds=(0.1, 10), method="bounded", options={"xatol": 1e-9})
    found = bias_variance.optimal_threshold(2.0, 0.4, noise_multiplier=23.2845, expected_batch_size=batch_size)
    assert found == pytest.approx(lowest.x, abs=1e-5)
    assert found == pytest.approx(golden, abs=1e-3)


def test_a_slope_of_brightness_has_one_direction():
    """Of -4, ..., 3: brighter to the right is 0, downwards 2, to the left -4."""
    ramp = np.broadcast_to(np.arange(0, 256, 8, dtype=np.uint8), (32, 32))
    images = np.stack([ramp, ramp.T, ramp[:, ::-1]])[..., None].repeat(3, axis=3)
    found = persons.features(images).unflatten(1, (8, 36))
    torch.testing.assert_close(found.norm(dim=(1, 2)), torch.full((3,), 10.0))
    weights = found[..., 0]
    assert weights.argmax(1).tolist() == [4, 6, 0]
    torch.testing.assert_close(weights.max(1).values, torch.full((3,), 10 / 6), rtol=1e-3, atol=0)  # of 36 cells
