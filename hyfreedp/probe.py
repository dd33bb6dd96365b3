"""The old place of :mod:`hyfreedp.rate_learner` and of results in :mod:`hyfreedp.records`."""

from __future__ import annotations

from typing import Any

from hyfreedp import rate_learner, records
from hyfreedp.renamed import tell_renamed

_MOVED = {name: (rate_learner, name) for name in ("LineSearch", "LossThresholdRule", "ProbeBatch", "StepRule")}
_MOVED |= {"Probe": (rate_learner, "LossSearch"), "ProbeResult": (records, "ProbeResult")}


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, new = _MOVED[name]
    tell_renamed(f"{__name__}.{name}", f"{module.__name__}.{new}")
    return getattr(module, new)
