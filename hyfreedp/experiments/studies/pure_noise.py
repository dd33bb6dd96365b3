"""Step rules on probes that see nothing but noise (notebook 05): where each takes the rate by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from hyfreedp import step_rules
from hyfreedp.curvefit import QuadraticFit, fit_quadratic
from hyfreedp.experiments.baselines.posterior import Rule, RuleName

MOMENTUM = 0.9  # of AdamW's first moment

StepRule = Callable[..., step_rules.StepDecision]


def drift(*, probes: int, start: float, runs: int, seed: int) -> pd.DataFrame:
    """The size of the rate after some probes of three losses that are nothing but independent normal noise.

    A fit's b and a scale with the noise and b/a does not, so how large the noise is plays no role.

    Args:
        probes: how many, each held for several steps.
        start: the first rate.
        runs: repetitions.
        seed: of the noise, the same for all rules.

    Returns:
        One row per ``rule``: the 0.1, 0.5 and 0.9 quantiles ``low``, ``median`` and ``high`` over the runs.
    """
    names: tuple[RuleName, ...] = ("literal", "gen", "posterior", "anchored")
    rules: dict[str, Callable[[], StepRule]] = {name: partial(Rule, name, MOMENTUM) for name in names}
    rules["gen, 0.9 of the new rate"] = lambda: _fast
    table = []
    for name, make in rules.items():
        generator = np.random.default_rng(seed)
        ends = [_end(make(), generator, probes, start) for _ in range(runs)]
        table.append([name, *np.quantile(ends, [0.1, 0.5, 0.9])])
    return pd.DataFrame(table, columns=["rule", "low", "median", "high"])


def _fast(fit: QuadraticFit, eta: float, *, held: bool) -> step_rules.StepDecision:
    return step_rules.gen(fit, eta, smoothing=0.9)


def _end(rule: StepRule, generator: np.random.Generator, probes: int, eta: float) -> float:
    for _ in range(probes):
        distance = getattr(rule, "reach", 1.0) * eta
        fit = fit_quadratic([distance, 0.0, -distance], generator.standard_normal(3), 1.0)
        eta = rule(fit, eta, held=True).eta
    return abs(eta)
