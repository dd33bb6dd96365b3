"""Losses along a run's direction: those that the run saw, without a trace in it."""

import itertools
from functools import partialmethod

import pytest

from hyfreedp import PrivacyEngine
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.train import make_run
from hyfreedp.experiments.studies import landscape
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
