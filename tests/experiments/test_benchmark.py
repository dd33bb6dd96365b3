"""The benchmark's logic, not anyone's speed: the comparison is fair, the numbers are right."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from models import Example

from hyfreedp.experiments.benchmark.contenders import CONTENDERS, MAX_GRAD_NORM, Contender, Setup, noise_multiplier
from hyfreedp.experiments.benchmark.measure import peak_memory
from hyfreedp.experiments.benchmark.workloads import Shape, Workload, make_workload
from hyfreedp.gradients import AbadiClipping, Clipping, NoClipping

for extra in ("timm", "transformers", "peft"):
    pytest.importorskip(extra)

SHAPES = {
    "vit": Shape("vit", 16, 2, 2, tokens=5, outputs=5, batch_size=4, patch=4),
    "gpt2": Shape("gpt2", 16, 2, 2, tokens=7, outputs=20, batch_size=4),
    "llama": Shape("llama", 16, 2, 2, tokens=7, outputs=20, batch_size=4, hidden=24, tunings=("full", "lora")),
    "mlp": Shape("mlp", 16, 3, 1, tokens=1, outputs=5, batch_size=4, tunings=("full",)),
    "convnet": Shape("convnet", 8, 5, 1, tokens=1, outputs=5, batch_size=4, tunings=("full",)),
}
ALL = [(name, tuning) for name, shape in SHAPES.items() for tuning in shape.tunings]
SGD = Setup(partial(torch.optim.SGD, lr=1.0), epsilon=float("inf"))


def clipped_mean(work: Workload, clipping: Clipping) -> torch.Tensor:
    """The slow, obvious twin: one sample at a time."""
    loss = lambda model, x, y: F.cross_entropy(model(x).flatten(0, -2), y.flatten())  # noqa: E731
    return Example(work.module, (work.inputs, work.labels), loss).clipped(clipping)[1] / len(work.inputs)


def step_taken(contender: Contender, work: Workload, setup: Setup = SGD) -> torch.Tensor:
    """What one step of SGD without noise changes, for a rate of 1."""
    work = work.copy()
    before = [p.detach().clone() for p in work.trainable]
    contender.make(work, setup)()
    return torch.cat([(old - p.detach()).flatten() for old, p in zip(before, work.trainable, strict=True)])


def stretched(family, tuning):
    """A workload of which some gradients are longer than the threshold and some shorter."""
    work = make_workload(SHAPES[family], tuning)
    for p in work.trainable:
        p.data *= 1.5
    return work


@pytest.mark.parametrize(("family", "tuning"), ALL)
def test_every_private_contender_takes_the_same_clipped_step(family, tuning):
    work = stretched(family, tuning)
    expected = clipped_mean(work, AbadiClipping(MAX_GRAD_NORM))
    assert 0 < expected.norm() < MAX_GRAD_NORM
    for name in ("opacus_hooks", "opacus_ghost", "opacus_functorch", "ours"):
        assert (step_taken(CONTENDERS[name], work) - expected).norm() < 2e-5 * expected.norm(), name
    for name in ("ours_k1", "ours_k5", "ours_k10"):  # the rate is learned, the direction is not
        step = step_taken(CONTENDERS[name], work)
        rate = step @ expected / expected.norm() ** 2
        # Rates near 1e-4 make steps that float32 weights hold to a few digits.
        assert rate > 0 and (step / rate - expected).norm() < 0.05 * expected.norm(), name
    unclipped = clipped_mean(work, NoClipping())
    torch.testing.assert_close(step_taken(CONTENDERS["plain"], work), unclipped, rtol=1e-4, atol=1e-6)


def test_contenders_add_the_same_noise():
    """At a rate of 1 the weights change by the noise as well, whose standard deviation is sigma R_g / B."""
    work = make_workload(SHAPES["gpt2"], "full")
    quiet = step_taken(CONTENDERS["ours"], work)
    for name in ("opacus_hooks", "opacus_ghost", "ours"):
        step = step_taken(CONTENDERS[name], work, replace(SGD, epsilon=3.0))
        noise = (step - quiet) * len(work.inputs) / MAX_GRAD_NORM
        # 7,000 numbers: 5 % are six standard errors of their standard deviation.
        assert noise.std().item() == pytest.approx(noise_multiplier(3.0, SGD.steps), rel=0.05), name


def test_peak_memory_counts_weights_state_and_the_largest_moment():
    """A linear layer without bias under SGD with momentum: what is alive can be counted by hand."""
    module = torch.nn.Linear(256, 256, bias=False)
    work = Workload(module, torch.zeros(64, 256), torch.zeros(64, dtype=torch.long))
    mib = 256 * 256 * 4 / 2**20  # of one copy of the weight

    def make(work, setup):
        optimizer = torch.optim.SGD(work.trainable, lr=0.1, momentum=0.9)

        def step():
            temporary = torch.zeros(8, 256, 256)
            del temporary
            work.trainable[0].grad = torch.ones(256, 256)
            optimizer.step()

        return step

    batch = (work.inputs.nbytes + work.labels.nbytes) / 2**20
    found = peak_memory(Contender("", make), work, Setup())
    # weight, momentum, last step's gradient, temporary
    assert found == pytest.approx(3 * mib + 8 * mib + batch, abs=0.01)
