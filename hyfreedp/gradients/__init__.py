"""Per-sample gradient clipping: the clipping rules, and the engine that clips and sums."""

from hyfreedp.gradients.batch_norm import replace_batch_norm
from hyfreedp.gradients.clipping import AbadiClipping, AutomaticClipping, Clipping, NoClipping
from hyfreedp.gradients.engine import GradientEngine
from hyfreedp.gradients.per_sample import MEMORY_BUDGET
from hyfreedp.gradients.validate import check_module

__all__ = [
    "MEMORY_BUDGET",
    "AbadiClipping",
    "AutomaticClipping",
    "Clipping",
    "GradientEngine",
    "NoClipping",
    "check_module",
    "replace_batch_norm",
]
