"""The noise that a privacy budget allows (Alg. 2, Eq. sigmas)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from hyfreedp.accounting.accountants import Accountant
from hyfreedp.accounting.composition import (
    NON_PRIVATE,
    cost,
    gradient_releases,
    spent,
    unsound_reasons,
    warn_if_unsound,
)
from hyfreedp.accounting.mechanisms import Mechanism
from hyfreedp.accounting.search import LARGEST_NOISE, SMALLEST_NOISE, TOLERANCE, smallest_noise
from hyfreedp.accounting.split import Allocation, Composition, NoiseSplit, count_probe_steps
from hyfreedp.checks import check_choice, check_count, check_number, check_probability
from hyfreedp.sensitivity import SQUARED_L2_SENSITIVITY, LossMechanism, Probe

DEFAULT_GAMMA = {"per_step": 1.02, "constant": 1.01}


def calibrate_noise(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    interval: int = 5,
    warmup_steps: int = 0,
    vote_steps: Sequence[int] = (),
    probe: Probe = "contrasts",
    gamma: float | None = None,
    accountant: Accountant = "pld",
    allocation: Allocation = "per_step",
    composition: Composition = "same_batch",
    loss_mechanism: LossMechanism = "gaussian",
) -> NoiseSplit:
    """Split a privacy budget between gradients and probes (Alg. 2; add/remove adjacency, Poisson sampling).

    With T steps, n of them with a probe, and sigma the noise multiplier of DP-SGD without probes at the same budget:

    * "per_step": every step costs what a step of DP-SGD at sigma costs, so any accountant's epsilon of that is the
      run's. sigma_g is sigma on steps without probe and gamma_p sigma on those with one, where gamma_p^2 = 1 +
      (T/n)(gamma^2 - 1), so that the mean variance of the gradient noise is gamma^2 sigma^2; sigma_l is
      sigma sqrt(s / (1 - gamma_p^-2)), s being the squared L2 sensitivity of a probe.
    * "constant": the paper's, sigma_g = gamma sigma on all steps and the smallest sigma_l with the epsilon of DP-SGD at
      sigma (Eq. sigmas). It equals the closed form above if every step probes.

    Where there is no closed form a root search ends on the private side: epsilon never exceeds the target. sigma_l is
    matched to the epsilon of DP-SGD at sigma rather than to the target, although they differ by 1e-6 at most: the
    probes' share of epsilon is so small that even this would show in sigma_l.

    Args:
        target_epsilon: > 0. Infinite: no noise at all (non-private).
        target_delta: in (0, 1), customarily below 1/N.
        sample_rate: q = B/N in (0, 1], probability with which a record enters a batch.
        steps: T >= 1.
        interval: K in [1, T], every K-th step probes (after the warm-up).
        warmup_steps: number of first steps that all probe, at most T.
        vote_steps: the steps that vote, in [0, T), each once; there may be none. For probe "votes", and for no other.
        probe: "contrasts", "losses", "votes", where ``interval`` and ``warmup_steps`` are ignored, or "none" for plain
            DP-SGD, where ``gamma`` is ignored too.
        gamma: > 1, how much larger the gradient noise is to pay for the probes; if None, 1.02 for "per_step" and 1.01
            for "constant".
        accountant: "pld" (tight), "rdp", or "gdp" (an approximation). Laplace noise restricts "rdp" to integer orders.
        allocation: "per_step" or "constant".
        composition: "same_batch" (Algorithm 1 as it is run), "independent" (Alg. 2 as printed) or "epsilon_sum" (the
            paper's appendix).
        loss_mechanism: "gaussian" or "laplace" noise on the probes.

    Warns:
        UnsoundAccountingWarning: once per process and reason, when the split's epsilon is no proven bound.

    Raises:
        ValueError: an argument is out of range, or no noise meets the budget.
    """
    target_epsilon = check_number("target_epsilon", target_epsilon)
    if target_epsilon <= 0:
        raise ValueError(f"target_epsilon must be positive, got {target_epsilon!r}")
    check_choice("probe", probe, Probe)
    check_choice("accountant", accountant, Accountant)
    check_choice("allocation", allocation, Allocation)
    check_choice("composition", composition, Composition)
    check_choice("loss_mechanism", loss_mechanism, LossMechanism)
    steps = check_count("steps", steps, 1)
    votes = tuple(sorted(check_count("vote_steps", step, 0, steps - 1, "steps - 1") for step in vote_steps))
    if len(set(votes)) < len(votes) or (votes and probe != "votes"):
        raise ValueError(
            f"vote_steps must differ, and be left out unless probe='votes', got {vote_steps!r} for probe={probe!r}"
        )
    if probe in ("losses", "contrasts"):
        interval = check_count("interval", interval, 1, steps, "steps")
        warmup_steps = check_count("warmup_steps", warmup_steps, 0, steps, "steps")
    if probe != "none":
        gamma = check_number("gamma", DEFAULT_GAMMA[allocation] if gamma is None else gamma)
        if not 1 < gamma < math.inf:
            raise ValueError(
                f"gamma must be greater than 1 and finite, got {gamma!r}: unless the gradient noise exceeds that of "
                "DP-SGD alone, nothing of the budget is left for the probes"
            )
    split = NoiseSplit(
        sigma=0.0,
        sigma_gradient=0.0,
        sigma_gradient_probe=0.0,
        sigma_loss=0.0,
        probe_steps=count_probe_steps(steps, interval, warmup_steps, probe, votes),
        epsilon=math.inf,
        guarantee=False,
        reason=NON_PRIVATE,
        target_epsilon=target_epsilon,
        target_delta=check_probability("target_delta", target_delta),
        sample_rate=check_probability("sample_rate", sample_rate, one_allowed=True),
        steps=steps,
        interval=interval,
        warmup_steps=warmup_steps,
        vote_steps=votes,
        probe=probe,
        gamma=1.0 if gamma is None or probe == "none" else gamma,
        accountant=accountant,
        allocation=allocation,
        composition=composition,
        loss_mechanism=loss_mechanism,
    )
    if math.isinf(target_epsilon):
        return split

    sigma = _vanilla_noise(split)
    if not split.probe_steps:
        split = dataclasses.replace(split, sigma=sigma, sigma_gradient=sigma, sigma_gradient_probe=sigma)
    elif allocation == "per_step":
        probe_multiplier = sigma * math.sqrt(1 + _probe_excess(split))
        split = dataclasses.replace(split, sigma=sigma, sigma_gradient=sigma, sigma_gradient_probe=probe_multiplier)
    else:
        multiplier = split.gamma * sigma
        split = dataclasses.replace(split, sigma=sigma, sigma_gradient=multiplier, sigma_gradient_probe=multiplier)
    if split.probe_steps:
        split = dataclasses.replace(split, sigma_loss=_loss_noise(split))

    reasons = unsound_reasons(accountant, composition, probe)
    warn_if_unsound(accountant, composition, probe, stacklevel=3)
    split = dataclasses.replace(
        split,
        epsilon=spent(split, split.steps, split.probe_steps),
        guarantee=not reasons,
        reason="; ".join(reasons),
    )
    margin = TOLERANCE
    while split.epsilon > target_epsilon:
        # The closed form costs what DP-SGD at sigma does but for rounding, which at a tiny delta can exceed the target.
        split = _with_more_noise(split, 1 + margin)
        margin *= 2
    return split


def _with_more_noise(split: NoiseSplit, factor: float) -> NoiseSplit:
    """All noise scaled alike, which keeps the relations between its parts."""
    scaled = dataclasses.replace(
        split,
        sigma=split.sigma * factor,
        sigma_gradient=split.sigma_gradient * factor,
        sigma_gradient_probe=split.sigma_gradient_probe * factor,
        sigma_loss=split.sigma_loss * factor,
    )
    return dataclasses.replace(scaled, epsilon=spent(scaled, split.steps, split.probe_steps))


def _vanilla_noise(split: NoiseSplit) -> float:
    """sigma = GetSigma(epsilon, delta, q, T) of Alg. 2, line 4."""
    budget = f"target_epsilon={split.target_epsilon} at target_delta={split.target_delta}"
    ever_sampled = 1 - (1 - split.sample_rate) ** split.steps
    if ever_sampled <= split.target_delta * (1 + 1e-9):
        raise ValueError(
            f"{budget} asks for no noise at all, since a record is ever sampled with probability "
            f"{ever_sampled:.3g} only. Choose a smaller target_delta, customarily below 1/N"
        )

    def noise(start: float, coarseness: int, tolerance: float) -> float:
        def spent_at(sigma: float) -> float:
            return _vanilla_epsilon(split, sigma, coarseness)

        return smallest_noise(spent_at, split.target_epsilon, start, tolerance)

    sigma = _on_two_grids(noise, split.accountant, start=1.0)
    if math.isinf(sigma):
        raise ValueError(
            f"no noise multiplier up to {LARGEST_NOISE:g} reaches {budget} with accountant={split.accountant!r}"
        )
    if sigma <= SMALLEST_NOISE:
        raise ValueError(f"{budget} is reached with a noise multiplier below {SMALLEST_NOISE}, which protects nobody")
    return sigma


def _probe_excess(split: NoiseSplit) -> float:
    """gamma_p^2 - 1, the relative increase of the gradient noise variance on probe steps."""
    excess = (split.gamma - 1) * (split.gamma + 1)
    return excess if split.allocation == "constant" else excess * split.steps / split.probe_steps


def _loss_noise(split: NoiseSplit) -> float:
    """sigma_l of a split whose gradient noise is set (Alg. 2, lines 8 and 9)."""
    # A probe step then costs what a step of DP-SGD at sigma does: sigma_g'^-2 + s sigma_l^-2 = sigma^-2.
    matching = split.sigma_gradient_probe * math.sqrt(SQUARED_L2_SENSITIVITY[split.probe] / _probe_excess(split))
    one_mechanism = split.composition == "same_batch" and split.loss_mechanism == "gaussian"
    if one_mechanism and (split.allocation == "per_step" or split.probe_steps == split.steps):
        return matching

    gradients = gradient_releases(split, split.steps, split.probe_steps)

    def noise(start: float, coarseness: int, tolerance: float) -> float:
        gradients_alone = cost(split, gradients, coarseness=coarseness)
        budget = _vanilla_epsilon(split, split.sigma, coarseness) - gradients_alone

        def spent_on_probes(sigma_loss: float) -> float:
            trial = dataclasses.replace(split, sigma_loss=sigma_loss)
            return spent(trial, split.steps, split.probe_steps, coarseness=coarseness) - gradients_alone

        return smallest_noise(spent_on_probes, budget, start, tolerance) if budget > 0 else math.inf

    sigma_loss = _on_two_grids(noise, split.accountant, start=matching)
    if math.isinf(sigma_loss):
        raise ValueError(
            f"gamma={split.gamma!r} leaves too little of the budget for the probes under "
            f"accountant={split.accountant!r} and composition={split.composition!r}: choose a larger one"
        )
    return sigma_loss


def _vanilla_epsilon(split: NoiseSplit, sigma: float, coarseness: int) -> float:
    return cost(split, ((Mechanism(sigma), split.steps),), coarseness=coarseness)


def _on_two_grids(noise: Callable[[float, int, float], float], accountant: Accountant, start: float) -> float:
    """``noise(start, coarseness, tolerance)``; under "pld" from where a search on a coarser, cheaper grid ended."""
    if accountant == "pld":
        rough = noise(start, 10, 1e-3)
        start = rough if math.isfinite(rough) else start
    return noise(start, 1, TOLERANCE)
