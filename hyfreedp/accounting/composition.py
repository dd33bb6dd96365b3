"""What a run releases under each composition, what that costs, and whether the answer is a bound."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence

from hyfreedp.accounting.accountants import INTEGER_ORDERS, ORDERS, Accountant, composed_epsilon
from hyfreedp.accounting.mechanisms import (
    Mechanism,
    Release,
    probe_mechanism,
    separate_probe_releases,
)
from hyfreedp.accounting.split import Composition, NoiseSplit, NoisyPlan, Plan
from hyfreedp.checks import check_choice, check_probability
from hyfreedp.sensitivity import Probe

NON_PRIVATE = "non-private: the target epsilon is infinite, nothing is noised"
_UNSOUND = {
    "gdp": "accountant='gdp' is a central limit approximation, not a bound",
    "independent": (
        "composition='independent' counts every release as if it drew its own batch, but the gradient and the probes "
        "of a step share one, so the true epsilon can be larger"
    ),
    "epsilon_sum": (
        "composition='epsilon_sum' adds two epsilons that each hold at target_delta, so their sum holds at twice that "
        "delta, and counts the probes as if they drew batches of their own"
    ),
}

warned_reasons: set[str] = set()  # reasons that this process has warned of; clear it to be warned again


class UnsoundAccountingWarning(UserWarning):
    """The epsilon just computed is no proven bound for Algorithm 1 as it is run."""


def gradient_releases(plan: NoisyPlan, steps: int, probe_steps: int) -> tuple[Release, ...]:
    """The gradients alone of ``steps`` steps of which ``probe_steps`` probe."""
    return (
        (Mechanism(plan.sigma_gradient), steps - probe_steps),
        (Mechanism(plan.sigma_gradient_probe), probe_steps),
    )


def probe_releases(plan: NoisyPlan, probe_steps: int, composition: Composition) -> tuple[Release, ...]:
    """The probes alone: one release per probe, or as many as its composition counts (Alg. 2, line 8: three losses)."""
    if not probe_steps:  # a plan without any has no noise for them
        return ()
    if composition == "same_batch":
        return ((probe_mechanism(plan.probe, plan.sigma_loss, plan.loss_mechanism), probe_steps),)
    return separate_probe_releases(plan.probe, plan.sigma_loss, plan.loss_mechanism, probe_steps)


def releases(
    plan: NoisyPlan, steps: int, probe_steps: int, composition: Composition
) -> tuple[tuple[Release, ...], ...]:
    """What ``steps`` steps release, in parts whose epsilons add up (one part, but for "epsilon_sum").

    * "same_batch": the gradient and the probe of a step are adaptive releases about one batch, so a probe step is a
      single subsampled mechanism; for Gaussian noise sigma_eff = (sigma_g^-2 + s sigma_l^-2)^(-1/2).
    * "independent": Alg. 2, line 8, gradients and probes as if every one drew its own batch.
    * "epsilon_sum": the paper's appendix, f^{3T/K}(sigma_l) + f^T(sigma_g), each at the same delta.
    """
    gradients = gradient_releases(plan, steps, probe_steps)
    probes = probe_releases(plan, probe_steps, composition)
    if not probes:
        return (gradients,)
    if composition == "same_batch":
        ((probe, count),) = probes
        return ((gradients[0], (probe.with_gaussian(plan.sigma_gradient_probe), count)),)
    return (gradients + probes,) if composition == "independent" else (gradients, probes)


def repeated_release(plan: NoisyPlan, probing: bool, gradients: int, probes: int) -> Mechanism:
    """What a step released whose one batch bore several gradients and probes: a single subsampled mechanism.

    Gaussian ones add up their precisions, gradients / sigma_g^2 + probes * s / sigma_l^2; Laplace coordinates are so
    many times more. They share the draw of the batch, so they are not amplified apart, whatever the composition.
    """
    precision = gradients / (plan.sigma_gradient_probe if probing else plan.sigma_gradient) ** 2
    if not probes:
        return Mechanism(precision**-0.5)
    probe = probe_mechanism(plan.probe, plan.sigma_loss, plan.loss_mechanism)
    return Mechanism((precision + probes / probe.gaussian**2) ** -0.5, probe.laplace, probes * probe.coordinates)


def cost(
    plan: Plan,
    released: tuple[Release, ...],
    *,
    target_delta: float | None = None,
    accountant: Accountant | None = None,
    coarseness: int = 1,
) -> float:
    """Epsilon of some releases of a run; no warning. Arguments left out are the plan's own.

    ``coarseness`` is how many times coarser than usual the grid of privacy losses is under "pld".
    """
    return composed_epsilon(
        released,
        sample_rate=plan.sample_rate,
        delta=plan.target_delta if target_delta is None else target_delta,
        accountant=plan.accountant if accountant is None else accountant,
        # One grid for everything of a run: with Laplace noise integers alone, or gradients alone would look cheaper.
        orders=INTEGER_ORDERS if plan.probe != "none" and plan.loss_mechanism == "laplace" else ORDERS,
        coarseness=coarseness,
    )


def spent(
    plan: NoisyPlan,
    steps: int,
    probe_steps: int,
    *,
    target_delta: float | None = None,
    accountant: Accountant | None = None,
    composition: Composition | None = None,
    coarseness: int = 1,
    repeats: Sequence[tuple[bool, int, int]] = (),
) -> float:
    """Epsilon of the first ``steps`` steps of a run, ``probe_steps`` of them with a probe, as :func:`cost`.

    ``repeats`` are those of them that released more than once: whether they probe, how many gradients and probes.
    """
    if steps == 0:
        return 0.0
    if math.isinf(plan.target_epsilon):
        return math.inf
    once = steps - len(repeats), probe_steps - sum(probing for probing, _, _ in repeats)
    first, *others = releases(plan, *once, plan.composition if composition is None else composition)
    again = tuple((repeated_release(plan, *repeat), count) for repeat, count in Counter(repeats).items())
    parts = (first + again, *others)
    return sum(
        cost(plan, part, target_delta=target_delta, accountant=accountant, coarseness=coarseness) for part in parts
    )


def shares(split: NoiseSplit, *, coarseness: int = 1) -> dict[str, float]:
    """Epsilon of parts of a run, each at the whole delta (so they do not add up), in the split's own accounting.

    Args:
        split: the noise and the number of steps.
        coarseness: see :func:`cost`.

    Returns:
        "gradients" and "probes" alone, both "together", and "vanilla" DP-SGD at the split's sigma.
    """
    if math.isinf(split.target_epsilon):
        return {"gradients": math.inf, "probes": math.inf, "together": math.inf, "vanilla": math.inf}
    return {
        "gradients": cost(split, gradient_releases(split, split.steps, split.probe_steps), coarseness=coarseness),
        "probes": cost(split, probe_releases(split, split.probe_steps, split.composition), coarseness=coarseness),
        "together": spent(split, split.steps, split.probe_steps, coarseness=coarseness),
        "vanilla": cost(split, ((Mechanism(split.sigma), split.steps),), coarseness=coarseness),
    }


def epsilon(
    noise_split: NoiseSplit,
    *,
    target_delta: float | None = None,
    accountant: Accountant | None = None,
    composition: Composition | None = None,
) -> float:
    """Epsilon of a whole run with this noise.

    Args:
        noise_split: the noise and the number of steps.
        target_delta: in (0, 1); the split's own if None.
        accountant: "pld", "rdp" or "gdp"; the split's own if None.
        composition: the split's own if None; "same_batch" tells what a split made under another one truly costs.

    Warns:
        UnsoundAccountingWarning: once per process and reason, when the answer is no proven bound.

    Raises:
        ValueError: an argument is out of range.
    """
    return epsilon_so_far(
        noise_split,
        noise_split.steps,
        noise_split.probe_steps,
        target_delta=target_delta,
        accountant=accountant,
        composition=composition,
    )


def epsilon_so_far(
    split: NoiseSplit,
    steps: int,
    probe_steps: int,
    *,
    target_delta: float | None = None,
    accountant: Accountant | None = None,
    composition: Composition | None = None,
    repeats: Sequence[tuple[bool, int, int]] = (),
) -> float:
    """:func:`epsilon` of the first ``steps`` steps, ``probe_steps`` of them with a probe; see :func:`spent`."""
    if target_delta is not None:
        check_probability("target_delta", target_delta)
    if accountant is not None:
        check_choice("accountant", accountant, Accountant)
    if composition is not None:
        check_choice("composition", composition, Composition)
    if math.isfinite(split.target_epsilon):
        warn_if_unsound(accountant or split.accountant, composition or split.composition, split.probe)
    return spent(
        split,
        steps,
        probe_steps,
        target_delta=target_delta,
        accountant=accountant,
        composition=composition,
        repeats=repeats,
    )


def unsound_reasons(accountant: Accountant, composition: Composition, probe: Probe) -> list[str]:
    """Why an epsilon computed in this way is no proven bound; empty if it is one."""
    keys = [accountant] if probe == "none" else [accountant, composition]
    return [_UNSOUND[key] for key in keys if key in _UNSOUND]


def warn_if_unsound(accountant: Accountant, composition: Composition, probe: Probe, stacklevel: int = 4) -> None:
    """Warn of each reason once per process, in the name of the caller's caller's caller by default."""
    for reason in unsound_reasons(accountant, composition, probe):
        if reason not in warned_reasons:
            warned_reasons.add(reason)
            warnings.warn(reason, UnsoundAccountingWarning, stacklevel=stacklevel)
