"""Presets: all that defines the method beyond data, model and privacy target, and the arguments that change them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

from hyfreedp.accounting.accountants import Accountant
from hyfreedp.accounting.split import Allocation, Probe
from hyfreedp.checks import check_choice, nearest
from hyfreedp.line_search import LossThresholdRule, StepRule
from hyfreedp.schedule import Decay, look_steps

P = ParamSpec("P")
R = TypeVar("R")


PAPER_RATE = 1e-4  # eta_0 of the paper's line search (§5.1)


@dataclass(frozen=True)
class Preset:
    """All that defines the method beyond data, model and privacy target; one setting for every task.

    Attributes:
        probe: what is released beside gradients: "look"s along the run (:mod:`hyfreedp.look`); three
            "losses" for a line search; or "none" for plain DP training at the base optimizer's own learning rate.
        step_rule: of a line search, how a noisy fit moves the learning rate (:mod:`hyfreedp.line_search`).
        smoothing: of step rule "gen", weight in (0, 1] of the clamped b/a in the next rate; the old one has the rest.
        loss_threshold_rule: how R_l follows the released losses (probe "losses").
        initial_learning_rate: eta_0, of a learned rate; None for that of the paper's line search, and for the public
            start of :mod:`hyfreedp.look`, whose looks reach from 32 times to a 32nd of it.
        interval: K, steps from probe to probe of a line search, or the length of a shorter run; looks come when
            :mod:`hyfreedp.look` says.
        warmup: share of the run, from its start, in which every step of a line search probes.
        gamma: growth of the gradient noise (root mean square over steps) that pays for the probes.
        allocation, accountant: see :func:`hyfreedp.calibrate_noise`.
        decay, decay_start: shape of the fall of the rate to zero at the horizon, and the share of the run before it.
    """

    probe: Probe = "look"
    step_rule: StepRule = "gen"
    smoothing: float = 0.1
    loss_threshold_rule: LossThresholdRule = "sum"
    initial_learning_rate: float | None = None
    interval: int = 5
    warmup: float = 0.0
    gamma: float = 1.01
    allocation: Allocation = "per_step"
    accountant: Accountant = "pld"
    decay: Decay = "none"
    decay_start: float = 0.0

    def releases(self, steps: int) -> dict[str, Any]:
        """Arguments of :func:`hyfreedp.calibrate_noise` that say what a run of T = ``steps`` releases, and who pays."""
        return {
            "steps": steps,
            "probe": self.probe,
            "interval": self.interval,
            "warmup_steps": int(self.warmup * steps),
            "vote_steps": look_steps(steps) if self.probe == "look" else (),
            "gamma": self.gamma,
            "allocation": self.allocation,
            "accountant": self.accountant,
        }


FIELDS = tuple(field.name for field in fields(Preset))  # which arguments may change

# "paper" is Alg. 1. What that does not print, the guards and the smoothing of rule "gen", is that of its authors' own
# package, gen-optim 0.1.1, which it equals step by step without privacy (tests/core/test_gen_optim.py).
PRESETS: dict[str, Preset] = {
    "robust": Preset(),
    "paper": Preset(probe="losses", initial_learning_rate=PAPER_RATE, allocation="constant"),
    "fixed": Preset(probe="none"),
}


_WEIGHTS = "weights go to each step: optimizer.step(loss, batch, weights=...), PrivateTrainer(weights=...)"

# Arguments of something else, most of them of Opacus's PrivacyEngine, and what to do instead.
ELSEWHERE = {
    **dict.fromkeys(("weights", "class_weight", "class_weights", "sample_weight", "sample_weights"), _WEIGHTS),
    "seed": "it is the engine's: PrivacyEngine(seed=...)",
    "lr": "the rate is learned; with preset='fixed' it is the optimizer's",
    "accountant": "each run has its own: make_private_with_epsilon(accountant='pld'), or 'rdp'",
    "secure_mode": "pass PrivacyEngine(secure_noise=True)",
    "noise_multiplier": "the noise follows from target_epsilon, target_delta and the length of the run",
    "max_grad_norm": "gradients are normalised; or pass clipping=hyfreedp.AbadiClipping(max_grad_norm)",
    "criterion": "the loss belongs to optimizer.step(loss, batch), where it maps one record to one number",
    "loss_reduction": "the loss of one record is one number, by whatever reduction",
    "views": "a record may have any number of rows: make its views in collate_fn or in the loss, and return their mean",
    "isolate": "each record is always computed apart from others; leave it out",
    "batch_first": "samples are the first dimension of every tensor of a batch",
    "poisson_sampling": "batches are always Poisson samples, as the accounting needs; leave it out",
    "noise_generator": "noise has keys of its own; PrivacyEngine(seed=...) makes them reproducible",
    "grad_sample_mode": "there is one engine; leave it out",
    "wrap_model": "the module comes back as it is, never wrapped",
    "rand_on_empty": "empty batches are steps like others",
}


def refuse_unknown(names: Iterable[str], known: Sequence[str]) -> None:
    """Refuse keyword arguments that are not among the ``known``, with what to write instead."""
    for name in names:
        if name not in known:
            remedy = f": {ELSEWHERE[name]}" if name in ELSEWHERE else nearest(name, known)
            raise TypeError(f"unknown argument {name!r}{remedy or ': allowed are ' + ', '.join(known)}")


def takes_preset_fields(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse arguments that are neither the function's own nor fields of :class:`Preset`, before one may be missing."""
    own = [name for name, one in signature(function).parameters.items() if one.kind is Parameter.KEYWORD_ONLY]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_unknown(kwargs, [*own, *FIELDS])
        return function(*args, **kwargs)

    return checked


# What only a line search has, and what only a run has that learns its rate, from what it releases beside gradients.
_OF_A_SEARCH = ("step_rule", "smoothing", "loss_threshold_rule", "interval", "warmup")
_OF_A_PROBE = ("gamma", "allocation", "initial_learning_rate")


def resolve(preset: str | Preset, changes: Mapping[str, Any], steps: int) -> Preset:
    """The settings of a run of ``steps``: a preset, by name or as it is, with some fields changed.

    A preset's own interval is shortened to a run that is shorter; one that was asked for is not.

    Raises:
        ValueError, TypeError: an unknown name, a field out of range, or a change of what this probe has not.
    """
    if isinstance(preset, str):
        check_choice("preset", preset, PRESETS)
        preset = PRESETS[preset]
    settings = replace(preset, **changes)
    if not 0 <= settings.warmup <= 1:
        raise ValueError(f"warmup must be a share of the run in [0, 1], got {settings.warmup}")
    if not 0 < settings.smoothing <= 1:
        raise ValueError(f"smoothing must be the weight of the new rate, in (0, 1], got {settings.smoothing}")
    check_choice("decay", settings.decay, Decay)
    if not 0 <= settings.decay_start < 1:
        raise ValueError(f"decay_start must be in [0, 1), got {settings.decay_start}")
    idle = () if settings.probe == "losses" else (*_OF_A_SEARCH, *(_OF_A_PROBE if settings.probe == "none" else ()))
    for name in changes:
        if name in idle:
            raise ValueError(
                f"{name} changes nothing with probe={settings.probe!r}: leave it out, or choose preset 'paper'"
            )
    if settings.probe == "losses" and "interval" not in changes:
        settings = replace(settings, interval=min(settings.interval, steps))
    return settings
