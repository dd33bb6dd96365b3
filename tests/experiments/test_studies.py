"""Losses along a run's direction: those that the run saw, without a trace in it."""

import itertools

import pytest
import torch

from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.train import make_run
from hyfreedp.experiments.studies import landscape
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.experiments.tasks.scores import losses_of

SPEC = {"method": "paper", "learning_rate": 0.05, "epsilon": 2.0, "interval": 1, "steps": 4, "seed": 0}


@pytest.fixture(scope="module")
def seen():
    """The first records of the run, with the raw losses that its own probes saw."""
    optimizer, loader = make_run(Spec(**SPEC), diagnostics=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    per_sample_loss = losses_of(optimizer.module)
    return [(optimizer.step(per_sample_loss, batch), len(batch[1])) for batch in itertools.islice(batches, 3)]


# -- along a run -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def probed():
    return landscape.probed_losses(spec=SPEC, stages=[0, 2], brightness=16.0)


def test_probed_losses_are_those_that_the_run_saw_and_leave_no_trace(probed, seen):
    """The rate moves at every probe, and one looks at the old rate: reach h / eta, along the same direction."""
    for step in (0, 2):
        record, size = seen[step]
        mine = landscape.losses_of(probed, step, "batch")
        assert mine.shape == (3, size) and landscape.distance_of(probed, step) == pytest.approx(record.eta, rel=1e-12)
        assert mine[1].mean() == pytest.approx(record.diagnostics["loss_here"], abs=2e-6)
        if record.probe.eta_next == record.probe.eta_probed:
            assert mine[0].mean() == pytest.approx(record.diagnostics["loss_ahead"], abs=2e-6)
            assert mine[2].mean() == pytest.approx(record.diagnostics["loss_behind"], abs=2e-6)


def test_probed_losses_hold_all_records_and_the_outlier(probed):
    sizes = probed.groupby(["step", "part"]).size()
    assert sizes[2, "train"] == TASKS["digits"].train_size and sizes[2, "outlier"] == 1
    features, label = landscape.outlier("digits", 16.0)
    train, labels = TASKS["digits"].datasets("test")[0].tensors
    assert torch.equal(features, 16 * train[:1]) and label != labels[0]
    with pytest.raises(ValueError, match="stages must be steps of the run, 0 to 3, got"):
        landscape.probed_losses(spec=SPEC, stages=[4], brightness=1.0)
