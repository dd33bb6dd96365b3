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
from hyfreedp.accounting.split import Allocation, Composition, NoiseSplit, NoisyPlan, Plan, count_probe_steps
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
    plan = Plan(
        target_epsilon=target_epsilon,
        target_delta=check_probability("target_delta", target_delta),
        sample_rate=check_probability("sample_rate", sample_rate, one_allowed=True),
        steps=steps,
        probe_steps=count_probe_steps(steps, interval, warmup_steps, probe, votes),
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
        noisy = NoisyPlan(**vars(plan), sigma=0.0, sigma_gradient=0.0, sigma_gradient_probe=0.0, sigma_loss=0.0)
        return NoiseSplit(**vars(noisy), epsilon=math.inf, guarantee=False, reason=NON_PRIVATE)

    noisy = _with_noise(plan)
    reasons = unsound_reasons(accountant, composition, probe)
    warn_if_unsound(accountant, composition, probe, stacklevel=3)
    margin = TOLERANCE
    while (epsilon := spent(noisy, steps, plan.probe_steps)) > target_epsilon:
        # The closed form costs what DP-SGD at sigma does but for rounding, which at a tiny delta can exceed the target.
        noisy = _with_more_noise(noisy, 1 + margin)
        margin *= 2
    return NoiseSplit(**vars(noisy), epsilon=epsilon, guarantee=not reasons, reason="; ".join(reasons))


def _with_noise(plan: Plan) -> NoisyPlan:
    """The noise by Alg. 2, lines 4 to 9, within the budget but for rounding."""
    sigma = _vanilla_noise(plan)
    if not plan.probe_steps:
        return NoisyPlan(**vars(plan), sigma=sigma, sigma_gradient=sigma, sigma_gradient_probe=sigma, sigma_loss=0.0)
    excess = (plan.gamma - 1) * (plan.gamma + 1)  # gamma_p^2 - 1, that of the gradient noise variance on probe steps
    if plan.allocation == "constant":
        sigma_gradient = sigma_gradient_probe = plan.gamma * sigma
    else:
        excess = excess * plan.steps / plan.probe_steps
        sigma_gradient, sigma_gradient_probe = sigma, sigma * math.sqrt(1 + excess)
    noisy = NoisyPlan(
        **vars(plan),
        sigma=sigma,
        sigma_gradient=sigma_gradient,
        sigma_gradient_probe=sigma_gradient_probe,
        # A probe step then costs what a step of DP-SGD at sigma does: sigma_g'^-2 + s sigma_l^-2 = sigma^-2.
        sigma_loss=sigma_gradient_probe * math.sqrt(SQUARED_L2_SENSITIVITY[plan.probe] / excess),
    )
    one_mechanism = plan.composition == "same_batch" and plan.loss_mechanism == "gaussian"
    if one_mechanism and (plan.allocation == "per_step" or plan.probe_steps == plan.steps):
        return noisy
    return dataclasses.replace(noisy, sigma_loss=_loss_noise(noisy))


def _with_more_noise(noisy: NoisyPlan, factor: float) -> NoisyPlan:
    """All noise scaled alike, which keeps the relations between its parts."""
    return dataclasses.replace(
        noisy,
        sigma=noisy.sigma * factor,
        sigma_gradient=noisy.sigma_gradient * factor,
        sigma_gradient_probe=noisy.sigma_gradient_probe * factor,
        sigma_loss=noisy.sigma_loss * factor,
    )


def _vanilla_noise(plan: Plan) -> float:
    """sigma = GetSigma(epsilon, delta, q, T) of Alg. 2, line 4."""
    budget = f"target_epsilon={plan.target_epsilon} at target_delta={plan.target_delta}"
    ever_sampled = 1 - (1 - plan.sample_rate) ** plan.steps
    if ever_sampled <= plan.target_delta * (1 + 1e-9):
        raise ValueError(
            f"{budget} asks for no noise at all, since a record is ever sampled with probability "
            f"{ever_sampled:.3g} only. Choose a smaller target_delta, customarily below 1/N"
        )

    def noise(start: float, coarseness: int, tolerance: float) -> float:
        def spent_at(sigma: float) -> float:
            return _vanilla_epsilon(plan, sigma, coarseness)

        return smallest_noise(spent_at, plan.target_epsilon, start, tolerance)

    sigma = _on_two_grids(noise, plan.accountant, start=1.0)
    if math.isinf(sigma):
        raise ValueError(
            f"no noise multiplier up to {LARGEST_NOISE:g} reaches {budget} with accountant={plan.accountant!r}"
        )
    if sigma <= SMALLEST_NOISE:
        raise ValueError(f"{budget} is reached with a noise multiplier below {SMALLEST_NOISE}, which protects nobody")
    return sigma


def _loss_noise(noisy: NoisyPlan) -> float:
    """sigma_l beside the gradient noise of ``noisy``, by a search that starts from its own (Alg. 2, lines 8 and 9)."""
    gradients = gradient_releases(noisy, noisy.steps, noisy.probe_steps)

    def noise(start: float, coarseness: int, tolerance: float) -> float:
        gradients_alone = cost(noisy, gradients, coarseness=coarseness)
        budget = _vanilla_epsilon(noisy, noisy.sigma, coarseness) - gradients_alone

        def spent_on_probes(sigma_loss: float) -> float:
            trial = dataclasses.replace(noisy, sigma_loss=sigma_loss)
            return spent(trial, noisy.steps, noisy.probe_steps, coarseness=coarseness) - gradients_alone

        return smallest_noise(spent_on_probes, budget, start, tolerance) if budget > 0 else math.inf

    sigma_loss = _on_two_grids(noise, noisy.accountant, start=noisy.sigma_loss)
    if math.isinf(sigma_loss):
        raise ValueError(
            f"gamma={noisy.gamma!r} leaves too little of the budget for the probes under "
            f"accountant={noisy.accountant!r} and composition={noisy.composition!r}: choose a larger one"
        )
    return sigma_loss


def _vanilla_epsilon(plan: Plan, sigma: float, coarseness: int) -> float:
    return cost(plan, ((Mechanism(sigma), plan.steps),), coarseness=coarseness)


def _on_two_grids(noise: Callable[[float, int, float], float], accountant: Accountant, start: float) -> float:
    """``noise(start, coarseness, tolerance)``; under "pld" from where a search on a coarser, cheaper grid ended."""
    if accountant == "pld":
        rough = noise(start, 10, 1e-3)
        start = rough if math.isfinite(rough) else start
    return noise(start, 1, TOLERANCE)
