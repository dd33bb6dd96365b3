"""The rate of preset "robust": a public start, and looks along the run so far, at the noise of the run to come.

AdamW on normalised gradients is scale-free: at a rate of c / sqrt(T) the noise of T steps adds up to about c, whatever
T is. What that does to the outputs of a layer grows with the root of its width, so c starts lower in larger models.
Too high a rate shows late, when noise has added up; but the noise of the rest of the run is known, being our own.
So a *look* adds it before it asks. Early steps at another rate are, to first order, these, scaled; so the losses of one
batch are compared at

    w_0 + (c_j / c) (w - w_0) + kappa c_j s z,    c_j = 32 c_0, 16 c_0, ..., c_0 / 32,

with s^2 T the squared factors of the schedule's steps that are left, and one public standard normal z. The signal to
come is left out; so only a part of the noise counts, that the signal so far can stand against. Most of it comes early:
kappa^2 is p^(3/4), with p the share of the schedule's way that was made. Each record votes between neighbours. From the
rate in force the votes lead up or down as long as they are clear; what is not on the way is not asked, but paid for. A
look errs by an octave, so the run goes on at the geometric mean of the start and of all looks, but where more than
three records in four agree that this is wrong. The first look has seen a single step: it counts until the second one.
Weights that went too far come back along the ray; up it they go after one step only, whose direction no rate changes.

Without privacy the noise is that of drawing batches. Adam's steps are as long, and it adds up and counts alike.
After the looks the rate stays. The run ends at an average of its weights, the t-th counted as t^8, as after a decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hyfreedp.accounting.split import VOTE_CLIP, VOTES
from hyfreedp.learner import BatchView, RateLearner
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import loss_noise_std, privatize_votes
from hyfreedp.pytorch.base_optimizer import trainable
from hyfreedp.pytorch.records import LookResult
from hyfreedp.schedule import FIRST_LOOK_STEP, LOOK_SHARES, look_steps

# Measured on validation data of small tasks, see docs/step_rule.md. Users set none of it but the start.
START = 6.0  # how far the noise of a run at the first rate moves what the model computes, see public_start()
LADDER = tuple(2.0 ** (VOTES / 2 - j) for j in range(VOTES + 1))  # rates compared, over the first one
GAIN = 0.75  # power of the share of the way that was made, by which a run's gain grows: kappa^2
CLEAR = 0.1  # margin beyond which votes lead on
SURE = 0.5  # and beyond which they do so from the mean with the looks before, too
POWER = 8.0  # of t, by which the weights after t steps count in the average
PUBLIC_SEED = 0  # of z, which hides nothing

CONSTANTS = (START, LADDER, FIRST_LOOK_STEP, LOOK_SHARES, GAIN, CLEAR, SURE, POWER, PUBLIC_SEED)


def public_start(parameters: Sequence[Tensor]) -> float:
    """c_0: the first rate, times sqrt(T), in units of the base optimizer's displacement per gradient.

    The noise of a run moves each weight by c, and so an output of a layer with n inputs of size 1 by c sqrt(n). The
    layers' noises add up. So c_0 is :data:`START` over the root of the sum of all n, which is public. A matrix has its
    outputs in dimension 0; of a vector, or what all samples share in such a dimension of size 1, n is 1.
    """
    return START / math.sqrt(sum(p.numel() // len(p) if p.dim() > 1 and len(p) > 1 else 1 for p in parameters))


def noise_to_come(schedule: Sequence[float], made: int, momentum: float = 0.0) -> float:
    """kappa s: how far noise will displace a coordinate, at c = 1, of which a look after ``made`` steps adds so much.

    Args:
        schedule: what multiplies the rate at each of the T steps.
        momentum: of SGD, by which the gradients so far have not yet moved as far as they will.
    """
    ahead = math.fsum(factor**2 for factor in schedule[made:]) / len(schedule)
    way = math.fsum(factor * (1 - momentum ** (made - t)) for t, factor in enumerate(schedule[:made]))
    return math.sqrt(ahead * (way / math.fsum(schedule)) ** GAIN)


def choose(margin: Callable[[int], float], level: float, needed: float) -> float:
    """The rate to which votes between the neighbours of :data:`LADDER` lead, in units of the first rate.

    From a rate they lead up while more records than needed prefer a higher one, or down while more prefer a lower: to
    where that ends, in steps of 2 %. A margin stands in the middle of its two rates.

    Args:
        margin: of the j-th rate to the next, lower one, positive where the j-th is preferred; asked where it is needed.
        level: the rate to begin at.
        needed: the margin that leads on.
    """

    def found(place: int) -> float:
        below, share = divmod(min(max(VOTES / 2 - 0.5 - place / 32, 0.0), VOTES - 1), 1)
        return (1 - share) * margin(int(below)) + (share and share * margin(int(below) + 1))

    end = 32 * (VOTES // 2)
    start = at = min(max(round(32 * math.log2(level)), -end), end)
    while at < end and found(at) > needed:
        at += 1
    while at > -end and found(at) < -needed:
        at -= 1
    return level if at == start else 2.0 ** (at / 32)


class LookedRate(RateLearner):
    """The learning rate of a run, the weights that its looks compare, and the way back.

    Memory: the average; the first weights until the last look; from a look to its step's gradient the present ones;
    while looking, a ray.

    Args:
        optimizer: the base optimizer.
        schedule: what multiplies the rate at each of the T steps.
        noise_std: of a coordinate of the private gradient; 0 without noise.
        eta: the first rate; None for c_0 / sqrt(T) in units of the optimizer's displacement, see :func:`public_start`.

    Raises:
        ValueError: it is unknown how far this optimizer moves, see :func:`displacement_per_gradient`; or ``eta`` is out
            of range.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Sequence[float], noise_std: float, eta: float | None = None
    ) -> None:
        if eta is not None and not 0 < eta < math.inf:
            raise ValueError(f"initial_learning_rate must be finite and positive, got {eta}")
        steps, groups = len(schedule), optimizer.param_groups
        self._looks_at = look_steps(steps)
        self._parameters = trainable(optimizer)
        first = float(groups[0]["lr"])
        ratios = [(float(group["lr"]) / first, group["params"]) for group in groups] if first > 0 else []
        self._ratios = [ratio for ratio, parameters in ratios for p in parameters if p.requires_grad]
        displacement, proportional = displacement_per_gradient(optimizer, steps)
        self._reach = math.sqrt(steps) * displacement  # of the run's noise, per unit of rate and of the gradient
        momentum = float(groups[0].get("momentum", 0.0))
        self._to_come = {t: noise_to_come(schedule, t, momentum) for t in self._looks_at}
        # Size of a private gradient's coordinates: public where there is noise, else the first gradient's.
        self._unit = (noise_std or math.nan) if proportional else 1.0
        self._first = eta
        self._c0 = public_start(self._parameters)
        self._made = 0  # steps
        self._found: list[float] = []  # by the looks so far, in units of the first rate
        self._start: list[Tensor] = []
        self._average: list[Tensor] = []
        self._steps = steps
        self._level = 1.0  # of the rate in force, in the same
        self._undo: tuple[list[Tensor], float] | None = None  # before a look that is not committed

    @property
    def eta(self) -> float:
        """The rate in force, without decay. NaN before the first gradient where its size sets the unit."""
        return self._first_eta * self._level

    @property
    def _first_eta(self) -> float:
        return self._c0 / (self._reach * self._unit) if self._first is None else self._first

    def on_step_start(self, step: int) -> None:
        """At the first step, keep the weights as those of the start."""
        self._made = step
        if step == 0 and self._looks_at:
            self._start = [p.detach().clone() for p in self._parameters]

    def vote_before_step(self, view: BatchView) -> LookResult:
        """Let the records vote between the rates of the ladder; go on at what they found, from where it leads."""
        present = [p.detach().clone() for p in self._parameters]
        eta, first, ray = self.eta, self._first_eta, self._ray(present)

        @cache
        def losses(j: int) -> Tensor:
            with view.processes.all_or_none():
                self._set(torch._foreach_add(self._start, ray, alpha=LADDER[j]))
                return view.batch.losses()

        @cache
        def margin(j: int) -> float:  # of at most VOTES, one after the other, as the accountant counts them
            (released,) = privatize_votes(
                torch.stack([losses(j), losses(j + 1)]),
                view.noise_multiplier,
                expected_batch_size=view.expected_batch_size,
                weights=view.batch.weights,
                generator=view.generator,
                add_up=view.processes.add_up,
            )
            margins[j] = released
            return released

        margins: list[float | None] = [None] * VOTES
        try:
            found = choose(margin, self._level, CLEAR)
            counted = [*self._found[1:], found]  # the first look counts until the second
            level = choose(margin, math.prod(counted) ** (1 / (1 + len(counted))), SURE)
        finally:
            self._set(present)
        view.released()
        self._undo = present, self._level
        self._found.append(found)
        self._level = level
        along = self.eta / eta if eta > 0 else 1.0
        if self._made > FIRST_LOOK_STEP:
            along = min(1.0, along)
        if along != 1:
            self._set([start.lerp(p, along) for start, p in zip(self._start, present, strict=True)])
        std = float(loss_noise_std(VOTE_CLIP, view.noise_multiplier, view.expected_batch_size))
        return LookResult(tuple(rung * first for rung in LADDER), tuple(margins), std, found * first, self.eta, along)

    @torch.no_grad()
    def _ray(self, present: list[Tensor]) -> tuple[Tensor, ...]:
        """From w_0, what the first rate would have moved and its noise to come; z is public, groups at their rates."""
        public = NoiseGenerator(PUBLIC_SEED).child("look", self._made)
        ray = torch._foreach_sub(present, self._start)
        if math.isnan(self._unit):  # no gradient so far but zeros, which moved nothing: all rates are alike
            return ray
        torch._foreach_div_(ray, self._level)
        displacement = self._first_eta * self._reach * self._unit * self._to_come[self._made]
        for i, (way, ratio) in enumerate(zip(ray, self._ratios, strict=True)):
            z = public.child("z", i).normal(*way.shape, device=way.device)
            way.add_(z.to(way), alpha=displacement * ratio)
        return ray

    def undo(self) -> None:
        """Take a look's move and its finding back."""
        if self._undo is not None:
            present, self._level = self._undo
            self._set(present)
            self._found.pop()
            self._undo = None

    def on_gradient(self) -> None:
        """Commit what a look moved; take the unit from the first private gradient, in ``.grad``, if it is unknown."""
        self._undo = None
        if math.isnan(self._unit):
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            squares = torch.stack([gradient.double().square().sum() for gradient in gradients]).tolist()
            self._unit = math.sqrt(sum(squares) / sum(gradient.numel() for gradient in gradients)) or math.nan

    @torch.no_grad()
    def on_step_end(self) -> None:
        """A step was made: take its weights into the average, which are the model's after the last one."""
        self._made += 1
        if self._made > max(self._looks_at, default=0):
            self._start = []
        wide = [p.detach().to(torch.promote_types(p.dtype, torch.float32)) for p in self._parameters]
        if self._made == 1:
            self._average = [weight.clone() for weight in wide]
        elif self._average:
            torch._foreach_lerp_(self._average, wide, (1 + POWER) / (self._made + POWER))
        if self._made == self._steps:
            self._set(self._average)
            self._average = []

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The weights are their average, for the length of a ``with``."""
        present = [p.detach().clone() for p in self._parameters]
        try:
            self._set(self._average or present)
            yield
        finally:
            self._set(present)

    @torch.no_grad()
    def _set(self, weights: Sequence[Tensor]) -> None:
        for parameter, weight in zip(self._parameters, weights, strict=True):
            parameter.copy_(weight)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and the live tensors that :meth:`load_state_dict` restores exactly."""
        weights = {"start": list(self._start), "average": list(self._average)}
        return {"made": self._made, "unit": self._unit, "found": list(self._found), "level": self._level} | weights

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._made, self._unit, self._found = state["made"], state["unit"], list(state["found"])
        self._level = state["level"]
        devices = [p.device for p in self._parameters]
        self._start = [w.to(d, copy=True) for w, d in zip(state["start"], devices, strict=False)]
        self._average = [w.to(d, copy=True) for w, d in zip(state["average"], devices, strict=False)]

    def __repr__(self) -> str:
        """All that does not change during a run."""
        return f"{type(self).__name__}{CONSTANTS}, from {self._first}"


def displacement_per_gradient(optimizer: torch.optim.Optimizer, steps: int) -> tuple[float, bool]:
    """How far one gradient moves the weights in all, per unit of rate, and whether that is in units of the gradient.

    Momentum beta repeats a gradient, 1 / (1 - beta) times in all. Adam's kin make its coordinates of size 1; RMSprop,
    which corrects no bias, of size (1 - alpha^t)^-1/2 at step t, of which the root mean square over ``steps`` counts.
    SGD leaves them as they are. The first group of the optimizer counts.

    Raises:
        ValueError: another kind of optimizer; or, with this momentum, a gradient would move the weights for ever, or
            but for the first not at all.
    """
    group = optimizer.param_groups[0]
    if "betas" in group and not isinstance(optimizer, torch.optim.RAdam):  # whose first steps are not normalised
        return 1.0, False
    if not isinstance(optimizer, torch.optim.SGD | torch.optim.RMSprop):
        raise ValueError(
            f"optimizer must be SGD, RMSprop or of Adam's kin but RAdam, for its rate to be learned by looks, got "
            f"{type(optimizer).__name__}, whose steps may be of any size: choose AdamW, or preset='paper' or 'fixed'"
        )
    for name in ("momentum", "dampening", "alpha"):
        if not float(group.get(name, 0.0)) < 1:
            raise ValueError(
                f"optimizer must have {name} below 1, got {group[name]}: choose momentum 0.9, alpha 0.99, no dampening"
            )
    repeated = (1 - float(group.get("dampening", 0.0))) / (1 - float(group.get("momentum", 0.0)))
    if isinstance(optimizer, torch.optim.SGD):
        return repeated, True
    uncorrected = sum(1 / (1 - float(group["alpha"]) ** t) for t in range(1, steps + 1)) / steps
    return repeated * math.sqrt(uncorrected), False
