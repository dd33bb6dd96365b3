"""The noise that a privacy budget allows (Alg. 2, Eq. sigmas)."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from hyfreedp.accounting.accountants import Accountant
from hyfreedp.accounting.composition import cost, epsilon, releases
from hyfreedp.accounting.search import LARGEST_NOISE, SMALLEST_NOISE, TOLERANCE, smallest_noise
from hyfreedp.accounting.split import SQUARED_L2_SENSITIVITY, Allocation, NoiseSplit, Probe
from hyfreedp.checks import check_choice, check_count, check_number, check_type
from hyfreedp.schedule import look_steps


def calibrate_noise(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    interval: int = 5,
    warmup_steps: int = 0,
    vote_steps: Sequence[int] | None = None,
    probe: Probe = "look",
    gamma: float = 1.01,
    accountant: Accountant = "pld",
    allocation: Allocation = "per_step",
    records_per_person: int = 1,
) -> NoiseSplit:
    """Split a privacy budget between gradients and probes (Alg. 2; add/remove adjacency, Poisson sampling).

    Let n of the T steps have a probe, and sigma be the noise multiplier of DP-SGD without probes at the same budget.

    * "per_step": every step costs exactly what a step of DP-SGD at sigma costs, so the whole run does, too. sigma_g is
      sigma in steps without probe and gamma_p sigma in steps with one, where gamma_p^2 = 1 + (T/n)(gamma^2 - 1), so
      that the mean variance of the gradient noise is gamma^2 sigma^2. sigma_l is sigma sqrt(s / (1 - gamma_p^-2)),
      where s is the squared L2 sensitivity of a probe.
    * "constant", as in the paper: sigma_g = gamma sigma in all steps, and the smallest sigma_l at which the run costs
      what DP-SGD at sigma costs (Eq. sigmas). If every step probes, both are the same.

    Epsilon never exceeds the target. The defaults are those of preset "robust".

    Args:
        target_epsilon: > 0. Infinite: no noise at all (non-private).
        target_delta: in (0, 1), customarily below 1/N.
        sample_rate: q = B/N in (0, 1], the probability with which a record enters a batch.
        steps: T >= 1.
        interval: K in [1, T]: every K-th step probes (after the warm-up).
        warmup_steps: the number of steps, at the start, that all probe; at most T.
        vote_steps: the distinct steps in [0, T) with a look (probe "look" only); None: ``schedule.look_steps``.
        probe: "look", which ignores ``interval`` and ``warmup_steps``; "losses", a line search; or "none", plain
            DP-SGD, which ignores ``gamma``, too.
        gamma: > 1, the factor on the gradient noise that pays for the probes; 1.01 in the paper.
        accountant: "pld" (tight) or "rdp".
        allocation: "per_step" or "constant".
        records_per_person: k >= 1: the budget holds for a person with up to k records; "pld" only.

    ValueError if an argument is out of range, or no noise meets the budget.
    """
    target_epsilon = check_number("target_epsilon", target_epsilon, "(0, inf]")
    check_choice("probe", probe, Probe)
    if probe != "none":
        gamma = check_number("gamma", gamma)
        if not 1 < gamma <= 1e9:
            raise ValueError(f"gamma must be above 1, or no budget is left for probes, and at most 1e9, got {gamma!r}")
    if vote_steps is None:
        vote_steps = look_steps(check_count("steps", steps, 1), probe)
    split = NoiseSplit(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sample_rate=sample_rate,
        steps=steps,
        interval=interval,
        warmup_steps=warmup_steps,
        vote_steps=vote_steps,  # type: ignore[arg-type]  # which becomes a tuple
        probe=probe,
        gamma=1.0 if probe == "none" else gamma,
        accountant=accountant,
        allocation=allocation,
        **dict.fromkeys(("sigma", "sigma_gradient", "sigma_gradient_probe", "sigma_loss"), 0.0),
        epsilon=math.inf,
        records_per_person=records_per_person,
    )
    if math.isinf(target_epsilon):
        return split
    split = _with_noise(split)
    margin = TOLERANCE
    while (achieved := epsilon(split)) > target_epsilon:
        # The closed form costs what DP-SGD at sigma does only up to rounding, which matters at a tiny delta.
        sigmas = {name: value * (1 + margin) for name, value in vars(split).items() if name.startswith("sigma")}
        split = dataclasses.replace(split, **sigmas)
        margin *= 2
    return dataclasses.replace(split, epsilon=achieved)


def recounted(split: NoiseSplit, *, accountant: Accountant, **plan: Any) -> NoiseSplit:
    """The user's ``split``, with its epsilon computed anew by ``accountant``; warns that its target is no guarantee.

    TypeError or ValueError if it is no split, has no noise, or differs from the ``plan`` of the run.
    """
    check_type("split", split, NoiseSplit, "a NoiseSplit")
    for name, value in plan.items():
        if name not in ("gamma", "allocation") and getattr(split, name) != value:  # these two do not affect the run
            raise ValueError(f"split must be of this run, got {name}={getattr(split, name)!r}, which is {value!r} here")
    split.check_noise()
    split = dataclasses.replace(split, accountant=accountant)
    split = dataclasses.replace(split, epsilon=epsilon(split))
    warnings.warn(
        f"split was made elsewhere: that it spends epsilon={split.target_epsilon:g} at delta={split.target_delta:g} is "
        f"its own claim, and no guarantee. It spends epsilon={split.epsilon:.4g} by {accountant!r}, as is counted",
        stacklevel=4,
    )
    return split


def _with_noise(split: NoiseSplit) -> NoiseSplit:
    """``split`` with the noise of Alg. 2, lines 4 to 10; rounding may exceed the budget a little."""
    sigma = _vanilla_noise(split)
    if not split.probe_steps:
        return dataclasses.replace(split, sigma=sigma, sigma_gradient=sigma, sigma_gradient_probe=sigma)
    excess = (split.gamma - 1) * (split.gamma + 1)  # gamma_p^2 - 1: relative growth of the noise variance
    if split.allocation == "constant":
        sigma_gradient = sigma_gradient_probe = split.gamma * sigma
    else:
        excess = excess * split.steps / split.probe_steps
        sigma_gradient, sigma_gradient_probe = sigma, sigma * math.sqrt(1 + excess)
    split = dataclasses.replace(
        split,
        sigma=sigma,
        sigma_gradient=sigma_gradient,
        sigma_gradient_probe=sigma_gradient_probe,
        # A probe step then costs what a step of DP-SGD at sigma does: sigma_g'^-2 + s sigma_l^-2 = sigma^-2.
        sigma_loss=sigma_gradient_probe * math.sqrt(SQUARED_L2_SENSITIVITY[split.probe] / excess),
    )
    if split.allocation == "per_step" or split.probe_steps == split.steps:
        return split
    return dataclasses.replace(split, sigma_loss=_loss_noise(split))


def _vanilla_noise(split: NoiseSplit) -> float:
    """sigma = GetSigma(epsilon, delta, q, T) of Alg. 2, line 4."""
    budget = f"target_epsilon={split.target_epsilon} at target_delta={split.target_delta}"
    ever_sampled = 1 - (1 - split.sample_rate) ** (split.steps * split.records_per_person)
    if ever_sampled <= split.target_delta * (1 + 1e-9):
        raise ValueError(
            f"{budget} asks for no noise at all, since a record is ever sampled with probability {ever_sampled:.3g}, "
            f"by sample_rate={split.sample_rate:.3g}: choose a smaller target_delta"
        )

    def noise(start: float, coarseness: int, tolerance: float) -> float:
        def spent_at(sigma: float) -> float:
            return cost(split, ((sigma, split.steps),), coarseness=coarseness)

        return smallest_noise(spent_at, split.target_epsilon, start, tolerance)

    # The search begins at the central limit of Eq. (muGDP), with about the mu that has this budget.
    tail = -2 * math.log(split.target_delta)
    mu = math.sqrt(tail + 2 * split.target_epsilon) - math.sqrt(tail)
    per_step = mu / (split.sample_rate * split.records_per_person * math.sqrt(split.steps))
    per_step = min(max(per_step, 1 / LARGEST_NOISE), LARGEST_NOISE)  # mu may have become 0 or infinite
    sigma = _on_two_grids(noise, split.accountant, start=math.log1p(per_step**2) ** -0.5)
    if math.isinf(sigma):
        reached = f"no noise up to {LARGEST_NOISE:g} reaches {budget} with accountant={split.accountant!r}"
        raise ValueError(f"{reached}: choose a larger target_epsilon or target_delta")
    if sigma <= SMALLEST_NOISE:
        raise ValueError(f"{budget} has noise multiplier below {SMALLEST_NOISE}, which protects nobody: lower epsilon")
    return sigma


def _loss_noise(split: NoiseSplit) -> float:
    """The smallest sigma_l that the budget allows, given the gradient noise of ``split`` (Alg. 2, lines 8 and 10).

    The budget is what DP-SGD at sigma costs, not the target. The small difference would matter in so small a share.
    """

    def noise(start: float, coarseness: int, tolerance: float) -> float:
        gradients_alone = cost(split, ((split.sigma_gradient, split.steps),), coarseness=coarseness)
        budget = cost(split, ((split.sigma, split.steps),), coarseness=coarseness) - gradients_alone

        def spent_on_probes(sigma_loss: float) -> float:
            trial = dataclasses.replace(split, sigma_loss=sigma_loss)
            return cost(trial, releases(trial, split.steps), coarseness=coarseness) - gradients_alone

        return smallest_noise(spent_on_probes, budget, start, tolerance) if budget > 0 else math.inf

    sigma_loss = _on_two_grids(noise, split.accountant, start=split.sigma_loss)
    if math.isinf(sigma_loss):
        raise ValueError(
            f"gamma={split.gamma!r} leaves too little for the probes by accountant={split.accountant!r}: raise it"
        )
    return sigma_loss


def _on_two_grids(noise: Callable[[float, int, float], float], accountant: Accountant, start: float) -> float:
    """``noise(start, 1, TOLERANCE)``; with "pld" a rough search, on a cheaper grid, first improves the start."""
    if accountant == "pld":
        rough = noise(start, 10, 1e-3)
        start = rough if math.isfinite(rough) else start
    return noise(start, 1, TOLERANCE)
