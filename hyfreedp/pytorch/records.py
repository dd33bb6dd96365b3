"""What a step reports: private values; raw ones only if asked for, under names that say so."""

import warnings
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn

from torch import Tensor


@dataclass(frozen=True)
class ProbeResult:
    """What a probe released and what was decided from it.

    Attributes:
        eta_probed, eta_next: the learning rate before and after, without decay. Losses were released at w and at
            w - eta_probed G and w + eta_probed G, with G the update direction.
        accepted, reason: whether the rule used the fit, and why.
        slope, curvature: b and a of the noisy parabola; ``slope_std``, ``curvature_std``: their standard errors.
        private_loss, loss_threshold: the released mean loss at w; the R_l at which losses were clipped.
    """

    eta_probed: float
    eta_next: float
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
        rates: the m + 1 rates that were compared, highest first, without decay.
        margins: for each rate but the last, the private mean vote for it against the next lower one; None if no vote
            was released. In runs without privacy, by how much its mean loss is lower.
        margin_std: standard deviation of the noise of each margin.
        chosen: the rate to which the votes lead from the current one.
        eta_next: the new rate, half of the way there in octaves.
        along: the weights were moved to w_0 + along (w - w_0), with w_0 the initial ones; 1: not moved.
    """

    rates: tuple[float, ...]
    margins: tuple[float | None, ...]
    margin_std: float
    chosen: float
    eta_next: float
    along: float


@dataclass(frozen=True)
class StepRecord:
    """What one step did: released values and what follows from them, but for ``diagnostics``. Threat model: WR.

    Attributes:
        step: 0-based number of the step.
        eta: the learning rate of the step, decay included.
        probe, look: what a probe or a look released and decided; None in steps without one.
        diagnostics: raw values, NOT private, for teaching and debugging only; None unless asked for.
    """

    step: int
    eta: float
    probe: ProbeResult | None = None
    look: LookResult | None = None
    diagnostics: dict[str, float] | None = None

    def __getattr__(self, name: str) -> NoReturn:
        known = ", ".join(field.name for field in fields(self))
        raise AttributeError(f"a step returns no {name!r}, only {known}: the loss of a batch is not private")

    def to_dict(self) -> dict[str, Any]:
        """One flat row for a pandas frame; names of diagnostics get the prefix ``not_private_``. Threat model: WR."""
        row: dict[str, Any] = {"step": self.step, "eta": self.eta}
        for released in (self.probe, self.look):
            if released is not None:
                row |= asdict(released)
        return row | {f"not_private_{name}": value for name, value in (self.diagnostics or {}).items()}


def raw_values(losses: Tensor, norms: Tensor, probed: Tensor | None) -> dict[str, float]:
    """Diagnostics of one step, NOT private. Threat model: RAW.

    Computed from per-sample losses at w and gradient norms, shape ``(B,)``, and in steps with a probe from the losses
    at (w - eta G, w, w + eta G), shape ``(3, B)``. Warns if no sample has a finite loss and gradient, so that the step
    is made of noise alone.
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
