"""What a run releases, and what epsilon that costs.

Gradient and probe of a step are adaptive releases of the same batch. So together they are one subsampled Gaussian
mechanism with sigma_eff = (sigma_g^-2 + s sigma_l^-2)^(-1/2), where s is the squared L2 sensitivity of a probe.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from hyfreedp.accounting.accountants import Accountant, Release, Sampled, composed_epsilon, epsilon_of, merge
from hyfreedp.accounting.split import SQUARED_L2_SENSITIVITY, NoiseSplit, Probe
from hyfreedp.checks import check_type


def probe_noise(sigma_loss: float, probe: Probe) -> float:
    """Noise multiplier of a probe as one vector, from the noise multiplier of each of its numbers."""
    return sigma_loss / math.sqrt(SQUARED_L2_SENSITIVITY[probe])


def effective_noise(sigma_gradient: float, sigma_loss: float, probe: Probe) -> float:
    """sigma_eff, the noise multiplier at which a gradient alone costs as much as this gradient and probe together."""
    return 1 / math.hypot(1 / probe_noise(sigma_loss, probe), 1 / sigma_gradient)


def releases(split: NoiseSplit, steps: int) -> tuple[Release, ...]:
    """The releases of the first ``steps`` steps of a run."""
    probes = split.probe_steps_before(steps)
    plain = (split.sigma_gradient, steps - probes)
    if not probes:  # then sigma_loss may be 0
        return (plain,)
    return plain, (effective_noise(split.sigma_gradient_probe, split.sigma_loss, split.probe), probes)


def cost(split: NoiseSplit, released: tuple[Release, ...], *, coarseness: int = 1) -> float:
    """Epsilon of some releases of a run, by the split's accountant; ``coarseness`` as in :func:`composed_epsilon`."""
    return composed_epsilon(
        released,
        sample_rate=split.sample_rate,
        delta=split.target_delta,
        accountant=split.accountant,
        coarseness=coarseness,
        records_per_person=split.records_per_person,
    )


def spent(split: NoiseSplit, steps: int, *, target_delta: float | None = None) -> float:
    """Epsilon of the first ``steps`` steps of a run, at ``target_delta``, or at the split's own if None."""
    if steps == 0:
        return 0.0
    if math.isinf(split.target_epsilon):
        return math.inf
    if target_delta is not None:
        split = replace(split, target_delta=target_delta)
    return cost(split, releases(split, steps))


def epsilon(
    noise_split: NoiseSplit, *, target_delta: float | None = None, accountant: Accountant | None = None
) -> float:
    """Epsilon of a whole run with this noise; None: the split's own ``target_delta`` and ``accountant``."""
    check_type("noise_split", noise_split, NoiseSplit, "what calibrate_noise returned")
    if accountant is not None:
        noise_split = replace(noise_split, accountant=accountant)
    return spent(noise_split, noise_split.steps, target_delta=target_delta)


def shares(split: NoiseSplit, *, coarseness: int = 1) -> dict[str, float]:
    """Epsilon of parts of a run, each at the whole delta, so that they do not add up.

    The parts are "gradients" alone, "probes" alone, both "together", and "vanilla" DP-SGD at the split's sigma.
    """
    if math.isinf(split.target_epsilon):
        return dict.fromkeys(("gradients", "probes", "together", "vanilla"), math.inf)
    steps, probes = split.steps, split.probe_steps
    parts: dict[str, tuple[Release, ...]] = {
        "gradients": ((split.sigma_gradient, steps - probes), (split.sigma_gradient_probe, probes)),
        "probes": ((probe_noise(split.sigma_loss, split.probe), probes),) if probes else (),
        "together": releases(split, steps),
        "vanilla": ((split.sigma, steps),),
    }
    return {name: cost(split, part, coarseness=coarseness) for name, part in parts.items()}


def epsilon_of_runs(runs: Iterable[tuple[NoiseSplit, int]], delta: float) -> float:
    """Epsilon at ``delta`` of several runs together, each given by its split and the number of steps made.

    Batches and noise of the runs must be independent. Noise, sample rates and lengths must be fixed before the first
    run; all else may depend on what earlier runs released. A record is in all runs or in none. So privacy losses are
    summed over runs, once for removing it and once for adding it, and the larger epsilon counts.
    """
    each: list[Sampled] = []
    for split, steps in runs:
        each += [(sigma, split.sample_rate, split.records_per_person, n) for sigma, n in merge(releases(split, steps))]
    return epsilon_of(tuple(each), delta)


def zcdp(split: NoiseSplit, steps: int) -> float:
    """rho of zero-concentrated DP (Bun & Steinke 2016): the sum over steps of k^2 / (2 sigma^2), for k records.

    There is no amplification by sampling: no smaller rho bounds a subsampled Gaussian at all orders.
    """
    return sum(n / 2 * (split.records_per_person / sigma) ** 2 for sigma, n in merge(releases(split, steps)))


def epsilon_of_zcdp(rho: float, delta: float) -> float:
    """Epsilon at ``delta`` of rho-zCDP, rho + 2 sqrt(rho log(1 / delta)) (Bun & Steinke 2016, Proposition 1.3)."""
    return rho + 2 * math.sqrt(-rho * math.log(delta))
