"""What a step tells about itself: private by default, raw values only where asked for and under names that say so."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from hyfreedp.probe import ProbeResult
from hyfreedp.votes import VoteResult


@dataclass(frozen=True)
class StepRecord:
    """What one step did. All but ``diagnostics`` is private: it was released with noise or computed from such.

    Attributes:
        step: 0-based.
        eta: the learning rate that the step took, decay included.
        probe, vote: what a probe or a vote released and decided, None on steps without one.
        diagnostics: raw, NOT private values, for teaching and debugging only; None unless asked for.
    """

    step: int
    eta: float
    probe: ProbeResult | None = None
    vote: VoteResult | None = None
    diagnostics: dict[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """One flat row for a pandas frame; diagnostics are prefixed with ``not_private_``."""
        row: dict[str, Any] = {"step": self.step, "eta": self.eta}
        if self.probe is not None:
            row |= asdict(self.probe)
        if self.vote is not None:
            row |= asdict(self.vote)
        return row | {f"not_private_{name}": value for name, value in (self.diagnostics or {}).items()}


def raw_values(losses: Tensor, norms: Tensor, probed: Tensor | None) -> dict[str, float]:
    """Diagnostics of one step, NOT private.

    Args:
        losses, norms: per-sample losses at w and gradient norms, shape ``(B,)``.
        probed: per-sample losses at (w - hG, w, w + hG), shape ``(3, B)``, on probe steps.
    """
    values = {
        "batch_size": float(losses.numel()),
        "mean_loss": losses.mean().item(),
        "mean_gradient_norm": norms.mean().item(),
        "non_finite_samples": float((~(losses.isfinite() & norms.isfinite())).sum().item()),
    }
    if probed is not None:
        values |= zip(("loss_ahead", "loss_here", "loss_behind"), probed.mean(dim=1).tolist(), strict=True)
    return values
