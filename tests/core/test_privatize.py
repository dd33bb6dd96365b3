"""Loss privatization: exact clipping, noise of the stated size, sensitivity, Theorem 1 and Corollary 1."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from hyfreedp import NoiseGenerator
from hyfreedp.accounting.split import SQUARED_L2_SENSITIVITY, VOTES
from hyfreedp.privatize import clipping_bias, loss_noise_std, normal_clipping_bias, privatize_loss, privatize_votes

FALSE_ALARM = 1e-6  # of each statistical test below; the seeds are fixed, so a test that passes always passes


@given(st.lists(st.floats(-1e3, 1e3), max_size=20), st.floats(1e-3, 1e2), st.integers(1, 50))
def test_without_noise_the_mean_of_the_clipped_losses_over_the_expected_size(losses, threshold, expected):
    values = torch.tensor(losses, dtype=torch.float64)
    private = privatize_loss(values, threshold, 0.0, expected_batch_size=expected)
    assert private.item() == pytest.approx(sum(min(max(loss, 0), threshold) for loss in losses) / expected, rel=1e-12)


def test_the_mean_of_a_million_losses_is_their_mean():
    """A sum in single precision would be off by more than a hundred times the tolerance."""
    losses = torch.rand(1_000_000, dtype=torch.float64)
    mean = privatize_loss(losses, 0.5, 0.0, expected_batch_size=1e6)
    assert float(mean) == pytest.approx(math.fsum(losses.clamp(max=0.5).tolist()) / 1e6, rel=1e-12)
    single = privatize_loss(torch.full((1_000_000,), 0.1), 0.5, 0.0, expected_batch_size=1e6)
    assert float(single) == pytest.approx(float(torch.tensor(0.1)), rel=1e-10)


@pytest.mark.parametrize("size", [0, 8])
def test_noise_has_the_stated_distribution(size):
    """Kolmogorov-Smirnov and chi-square on 4,000 releases, of a constant batch and of an empty one."""
    losses = torch.full((4000, size), 0.25)
    private = privatize_loss(losses, 0.5, 3.0, expected_batch_size=10, generator=NoiseGenerator(0)).numpy()
    noise = (private - 0.25 * size / 10) / (3.0 * 0.5 / 10)
    assert stats.kstest(noise, stats.norm().cdf).pvalue > FALSE_ALARM
    assert loss_noise_std(0.5, 3.0, 10) == pytest.approx(3.0 * 0.5 / 10)
    assert FALSE_ALARM / 2 < stats.chi2.cdf((noise**2).sum(), df=4000) < 1 - FALSE_ALARM / 2


CLIP = 0.5
LOSSES = (0.0, 1e-300, 0.25, CLIP, 3.0, 1e300, math.inf, math.nan)  # and 0.25 adds up exactly


def released_losses(records):
    """Three losses of each record, in units of the clip."""
    losses = torch.tensor(records, dtype=torch.float64).reshape(-1, 3).T
    return privatize_loss(losses, CLIP, 0.0, expected_batch_size=1) / CLIP


def released_votes(records):
    losses = torch.tensor(records, dtype=torch.float64).reshape(-1, VOTES + 1).T
    return torch.tensor(privatize_votes(losses, 0.0, expected_batch_size=1))


@pytest.mark.parametrize(
    ("probe", "release", "width"), [("losses", released_losses, 3), ("look", released_votes, VOTES + 1)]
)
def test_the_worst_record_moves_a_probe_by_what_the_accountant_counts(probe, release, width):
    """By all of it: a smaller sensitivity would be unsafe, a larger one a waste. Of a look, the worst in each order."""
    some = LOSSES if width == 3 else (0.0, math.nan)
    ordered, moves = [tuple(range(width)), tuple(range(width, 0, -1))], []
    for others in ([], [tuple(itertools.islice(itertools.cycle((math.inf, 0.0, 0.25)), width))]):
        before = release(others)
        for record in [*itertools.product(some, repeat=width), *ordered]:
            moves.append((release([*others, record]) - before).square().sum().item())
    assert SQUARED_L2_SENSITIVITY[probe] == max(moves)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=30), st.floats(1e-2, 1e3))
def test_theorem_1_bias_is_what_clipping_takes_away(losses, threshold):
    batch = torch.tensor(losses, dtype=torch.float64)
    private = privatize_loss(batch, threshold, 0.0, expected_batch_size=len(losses)).item()
    assert clipping_bias(batch, threshold) == pytest.approx(batch.mean().item() - private, abs=1e-9)


@pytest.mark.parametrize(("threshold", "mean", "std"), [(2.3, 2.3, 0.5), (0.1, 2.3, 0.5), (6.0, 2.3, 0.5), (1.0, 0, 3)])
def test_corollary_1_equals_the_integral_of_the_excess(threshold, mean, std):
    expected, _ = integrate.quad(
        lambda loss: (loss - threshold) * stats.norm.pdf(loss, mean, std), threshold, mean + 40 * std, epsabs=1e-14
    )
    assert normal_clipping_bias(threshold, mean, std) == pytest.approx(expected, rel=1e-7, abs=1e-12)
