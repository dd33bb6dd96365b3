"""What a step reports: private values, and raw ones only on request and under names that say so."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class ProbeResult:
    """What a probe released and what was decided from it.

    Attributes:
        eta_probed, eta_next: the learning rate before and after, without decay.
        distance: h, how far along the update direction the losses were probed.
        accepted, reason: whether the rule used the fit, and why.
        slope, curvature: b and a of the noisy parabola, with ``slope_std`` and ``curvature_std`` from the known noise.
        private_loss: released mean loss at w, and ``loss_threshold``, the R_l that clipped it.
    """

    eta_probed: float
    eta_next: float
    distance: float
    accepted: bool
    reason: str
    slope: float
    curvature: float
    slope_std: float
    curvature_std: float
    private_loss: float
    loss_threshold: float


@dataclass(frozen=True)
class LookResult:
    """What a look released and what was decided from it.

    Attributes:
        rates: the ladder, highest first, without decay, m + 1 of them.
        margins: for each rate but the last, the private mean vote for it against the next lower one; None where no
            vote was taken. Without privacy, how much lower the mean loss is.
        margin_std: standard deviation of the noise of each margin.
        chosen: the rate that the votes lead to, starting at the rate in force.
        eta_next: the rate from here on, half the way there in octaves.
        along: the fraction of the way from the initial weights at which the run goes on; 1 if the weights stay.
    """

    rates: tuple[float, ...]
    margins: tuple[float | None, ...]
    margin_std: float
    chosen: float
    eta_next: float
    along: float


@dataclass(frozen=True)
class StepRecord:
    """What one step did: values released with noise or computed from these, except ``diagnostics``. Threat model: WR.

    Attributes:
        step: 0-based.
        eta: the learning rate that the step took, decay included.
        probe, look: what a probe or a look released and decided, None on steps without one.
        diagnostics: raw, NOT private values, for teaching and debugging only; None unless asked for.
    """

    step: int
    eta: float
    probe: ProbeResult | None = None
    look: LookResult | None = None
    diagnostics: dict[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """One flat row for a pandas frame; diagnostics are prefixed with ``not_private_``. Threat model: WR."""
        row: dict[str, Any] = {"step": self.step, "eta": self.eta}
        for released in (self.probe, self.look):
            if released is not None:
                row |= asdict(released)
        return row | {f"not_private_{name}": value for name, value in (self.diagnostics or {}).items()}


def raw_values(losses: Tensor, norms: Tensor, probed: Tensor | None) -> dict[str, float]:
    """Diagnostics of one step, NOT private. Threat model: RAW.

    From per-sample losses at w and gradient norms, shape ``(B,)``, and, on probe steps, losses at (w - hG, w, w + hG),
    shape ``(3, B)``. Warns if no sample has a finite loss and gradient, so that the step consists of noise alone.
    """
    values = {
        "batch_size": float(losses.numel()),
        "mean_loss": losses.mean().item(),
        "mean_gradient_norm": norms.mean().item(),
        "non_finite_samples": float((~(losses.isfinite() & norms.isfinite())).sum().item()),
    }
    if values["non_finite_samples"] == values["batch_size"] > 0:
        warnings.warn(
            "no sample of this batch has a finite loss and gradient, so the step is made of noise alone: look for NaN "
            "in the data and in the loss. (Not private: told with diagnostics=True only)",
            stacklevel=4,
        )
    if probed is not None:
        values |= zip(("loss_ahead", "loss_here", "loss_behind"), probed.mean(dim=1).tolist(), strict=True)
    return values
