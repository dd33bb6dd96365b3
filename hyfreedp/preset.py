"""Presets (the settings of the method), the arguments that change them, and the plan of a run that follows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Literal, ParamSpec, TypeVar

from hyfreedp.accounting.accountants import Accountant
from hyfreedp.accounting.split import Allocation, NoiseSplit, Probe
from hyfreedp.checks import check_choice, check_number, check_type, nearest
from hyfreedp.schedule import Decay, decay_factor, look_steps

P = ParamSpec("P")
R = TypeVar("R")
StepRule = Literal["gen", "literal"]
LossThresholdRule = Literal["sum", "previous"]

PAPER_RATE = 1e-4  # eta_0 of the paper's line search (Alg. 1, line 1)


@dataclass(frozen=True)
class Preset:
    """The settings of the method, independent of data, model and privacy target.

    Attributes:
        probe: what is released beside gradients: "look", votes on the rate (:mod:`hyfreedp.look`); "losses", three of
            them for the paper's line search; or "none": plain DP training at the base optimizer's own learning rate.
        step_rule: line search only: how the rate follows from the noisy parabola (:mod:`hyfreedp.line_search`).
        smoothing: step rule "gen" only: the weight in (0, 1] of the clamped b/a; the old rate has the rest.
        loss_threshold_rule: line search only: how R_l follows from the released losses.
        initial_learning_rate: eta_0 of a learned rate. None: 1e-4 for a line search, as in the paper; for looks a
            public function of the model. Looks reach from eta_0 / 32 to 32 eta_0.
        interval: line search only: K, every K-th step probes; at most the length of the run.
        warmup: line search only: the share of the run, at its start, in which every step probes.
        gamma: factor on the gradient noise (root mean square over steps), by which the probes are paid for.
        allocation, accountant: see :func:`hyfreedp.calibrate_noise`.
        decay, decay_start: how the rate falls to zero at the end ("none": not), and after which share of the run.
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
        """Arguments of :func:`hyfreedp.calibrate_noise` for a run of ``steps`` with these settings."""
        of_steps = {"warmup_steps": int(self.warmup * steps), "vote_steps": look_steps(steps, self.probe)}
        same = {name: getattr(self, name) for name in ("probe", "interval", "gamma", "allocation", "accountant")}
        return {"steps": steps, **of_steps, **same}


FIELDS = tuple(field.name for field in fields(Preset))  # what arguments of make_private_with_epsilon may change

# "paper" is Alg. 1 with step rule "gen": the guards and the smoothing, which the paper does not print, are those of the
# authors' package gen-optim 0.1.1. Without privacy both take the same steps (tests/core/test_gen_optim.py).
PRESETS: dict[str, Preset] = {
    "robust": Preset(),
    "paper": Preset(probe="losses", initial_learning_rate=PAPER_RATE, allocation="constant"),
    "fixed": Preset(probe="none"),
}

_WEIGHTS = "weights go to each step: optimizer.step(loss, batch, weights=...), PrivateTrainer(weights=...)"

# Arguments that belong elsewhere, most of them of Opacus's PrivacyEngine, and what to do instead.
ELSEWHERE = {
    **dict.fromkeys(("weights", "class_weight", "class_weights", "sample_weight", "sample_weights"), _WEIGHTS),
    "seed": "it is the engine's: PrivacyEngine(seed=...)",
    **dict.fromkeys(("lr", "learning_rate"), "the rate is learned; with preset='fixed' it is the optimizer's"),
    "batch_size": "it is the data_loader's, of records or, with owners=, of owners",
    "accountant": "each run has its own: make_private_with_epsilon(accountant='pld'), or 'rdp'",
    "secure_mode": "pass PrivacyEngine(secure_noise=True)",
    "noise_multiplier": "the noise follows from target_epsilon, target_delta and the length of the run",
    "max_grad_norm": "gradients are normalised; or pass clipping=hyfreedp.AbadiClipping(max_grad_norm)",
    "criterion": "the loss belongs to optimizer.step(loss, batch), where it maps one record to one number",
    "loss_reduction": "the loss of one record is one number, by whatever reduction",
    "batch_first": "samples are the first dimension of every tensor of a batch",
    "poisson_sampling": "batches are always Poisson samples, as the accounting needs; leave it out",
    "noise_generator": "noise has keys of its own; PrivacyEngine(seed=...) makes them reproducible",
    "grad_sample_mode": "there is one engine; leave it out",
    "wrap_model": "the module comes back as it is, never wrapped",
    "rand_on_empty": "empty batches are steps like others",
}


def refuses_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: TypeError for a keyword argument that the function has not; the message says what to write instead.

    A function with ``**changes`` has the fields of :class:`Preset`, too. (Python would first miss other arguments.)
    """
    parameters = signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
        known += FIELDS

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                remedy = f": {ELSEWHERE[name]}" if name in ELSEWHERE else nearest(name, known)
                raise TypeError(f"unknown argument {name!r}{remedy or ': allowed are ' + ', '.join(known)}")
        return function(*args, **kwargs)

    return checked


_FOR_LINE_SEARCH = ("step_rule", "smoothing", "loss_threshold_rule", "interval", "warmup")
_FOR_LEARNED_RATES = ("gamma", "allocation", "initial_learning_rate")


def resolve(preset: str | Preset, changes: Mapping[str, Any], steps: int) -> Preset:
    """The settings of a run of ``steps``: a preset, given by name or as an object, with the ``changes``.

    The interval is lowered to ``steps``, unless it is among the changes. ValueError or TypeError for an unknown name, a
    field out of range, or a change of a field that the probe does not use.
    """
    if isinstance(preset, str):
        check_choice("preset", preset, PRESETS)
        preset = PRESETS[preset]
    check_type("preset", preset, Preset, f"one of {', '.join(map(repr, PRESETS))} or a Preset")
    settings = replace(preset, **changes)
    if settings.initial_learning_rate is not None:
        check_number("initial_learning_rate", settings.initial_learning_rate, "(0, inf)")
    check_number("warmup", settings.warmup, "[0, 1]")
    check_number("smoothing", settings.smoothing, "(0, 1]")
    check_number("decay_start", settings.decay_start, "[0, 1)")
    check_choice("probe", settings.probe, Probe)
    check_choice("step_rule", settings.step_rule, StepRule)
    check_choice("loss_threshold_rule", settings.loss_threshold_rule, LossThresholdRule)
    check_choice("decay", settings.decay, Decay)
    unused: tuple[str, ...] = () if settings.probe == "losses" else _FOR_LINE_SEARCH
    if settings.probe == "none":
        unused += _FOR_LEARNED_RATES
    for name in changes:
        if name in unused:
            raise ValueError(f"{name} does nothing with probe={settings.probe!r}: leave it out, or take preset 'paper'")
    if settings.probe == "losses" and "interval" not in changes:
        settings = replace(settings, interval=min(settings.interval, steps))
    return settings


@dataclass(frozen=True)
class RunPlan:
    """The settings of a run; which of its steps release what, with how much noise; and the schedule of its rate."""

    preset: Preset
    split: NoiseSplit

    def rate_factor(self, t: int) -> float:
        """The decay's factor on the learning rate at step t."""
        return decay_factor(t, self.split.steps, self.preset.decay, self.preset.decay_start)
