"""Differentially private training that needs no learning rate: HyFreeDP, and a rule of this package's own."""

from hyfreedp.accounting import NoiseSplit, calibrate_noise, epsilon
from hyfreedp.auditing import Audit, audit
from hyfreedp.curvefit import QuadraticFit, fit_quadratic
from hyfreedp.data.batches import token_budget
from hyfreedp.engine import PrivacyEngine
from hyfreedp.errors import BudgetExhausted
from hyfreedp.gradients import AbadiClipping, AutomaticClipping, replace_batch_norm
from hyfreedp.noise import NoiseGenerator
from hyfreedp.optimizer import HyFreeDPOptimizer
from hyfreedp.preset import PRESETS, Preset
from hyfreedp.privatize import clipping_bias, normal_clipping_bias, privatize_loss
from hyfreedp.pytorch.records import StepRecord
from hyfreedp.statement import Statement, total_epsilon

__all__ = [
    "PRESETS",
    "AbadiClipping",
    "Audit",
    "AutomaticClipping",
    "BudgetExhausted",
    "HyFreeDPOptimizer",
    "NoiseGenerator",
    "NoiseSplit",
    "Preset",
    "PrivacyEngine",
    "QuadraticFit",
    "Statement",
    "StepRecord",
    "audit",
    "calibrate_noise",
    "clipping_bias",
    "epsilon",
    "fit_quadratic",
    "normal_clipping_bias",
    "privatize_loss",
    "replace_batch_norm",
    "token_budget",
    "total_epsilon",
]
