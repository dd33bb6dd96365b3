"""The rate of preset "robust": a public start, and looks along the run so far, with the noise of the run to come.

AdamW on normalised gradients is scale-free: at a rate of c / sqrt(T) the noise of T steps adds up to about c, whatever
T is. Its effect on the outputs of a layer grows with the root of the layer's width, so c starts lower in larger models.

The harm of too high a rate shows late, when noise has added up. But the noise of the remaining steps is our own and
known in size, so a *look* adds it in advance. To first order, earlier steps at another rate are the same steps, scaled.
So a look compares the losses of one batch at

    w_0 + (c_j / c) (w - w_0) + kappa c_j s z,    c_j = 32 c_0, 16 c_0, ..., c_0 / 32,

where s^2 T is the sum of the squared factors of the schedule's remaining steps, and z one public standard normal. The
signal to come is missing here, so only a part of the noise counts: kappa^2 = p^(3/4), where p is the share of the
schedule that was made. Without privacy z stays: steps of Adam's kin are of the size of the rate, noise or not.

Each record votes between neighbouring rates (:func:`hyfreedp.privatize.privatize_votes`). Starting at the rate in
force, the votes lead up or down while they exceed their noise. Only votes on this way are taken, but all are paid for.
A look errs by about an octave, so the run moves half the way, in octaves. After the first step the weights move along,
in both directions; later they only come back towards w_0. The run ends at an average of its weights, which acts like a
decay. docs/step_rule.md has the reasons, and the measurements behind the constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hyfreedp.accounting.split import VOTE_CLIP, VOTES
from hyfreedp.learner import BatchView, RateLearner
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import loss_noise_std, noisy_mean, privatize_votes, within_floats
from hyfreedp.pytorch.base_optimizer import trainable
from hyfreedp.pytorch.records import LookResult
from hyfreedp.schedule import FIRST_LOOK_STEP, LOOK_SHARES

# Users set none of these but the start.
START_DISPLACEMENT = 6.0  # of the model's outputs by the noise of a run at the first rate, see public_start()
PRETRAINED_DISPLACEMENT = 0.55  # of each layer's outputs, if the model was trained before
LADDER = tuple(2.0 ** (VOTES / 2 - j) for j in range(VOTES + 1))  # rates to compare, in units of the first
NOISE_POWER = 0.75  # kappa^2 is the share of the schedule that was made, to this power
CLEAR_MARGIN = 2.0  # standard deviations of the noise of a margin, beyond which it leads on
CLEAR_VOTE = 0.05  # a mean vote that must exceed any noise: votes are as steep as that takes
STRIDE = 0.5  # share of the octaves from the rate in force to where a look leads, by which the rate moves
AVERAGE_POWER = 8.0  # the weights after t steps count as t to this power in the average
PUBLIC_SEED = 0  # of z, which hides nothing

CONSTANTS: tuple[Any, ...] = (START_DISPLACEMENT, PRETRAINED_DISPLACEMENT, LADDER, FIRST_LOOK_STEP, LOOK_SHARES)
CONSTANTS += (NOISE_POWER, CLEAR_MARGIN, CLEAR_VOTE, STRIDE, AVERAGE_POWER, PUBLIC_SEED)


def public_start(parameters: Sequence[Tensor], layers: Sequence[nn.Module] = ()) -> float:
    """c_0: the first rate, times sqrt(T), in units of the base optimizer's displacement per gradient.

    The noise of a run moves each weight by c, and so an output of a layer with n inputs of size 1 by c sqrt(n). The
    layers' noises add up. So c_0 is :data:`START_DISPLACEMENT` over the root of the sum of all n, which is public. A
    matrix has its outputs in dimension 0. For a vector, or if this dimension has size 1, n is 1.

    Of the V rows of an embedding table, among ``layers``, a record has some: between 1 and V. So n is the root of V,
    the middle in octaves, or a row's width if that is more, since products of two rows have so many terms.

    The entries of a norm's weight are alike until a training has changed them. What was learned then must survive the
    noise: for the n inputs that the norm scales, c_0 sqrt(n) is at most :data:`PRETRAINED_DISPLACEMENT`. Where norms
    are frozen, as with LoRA, the start needs no bound.
    """
    tables = [layer.weight for layer in layers if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    scales = [layer._parameters.get("weight") for layer in layers if "Norm" in type(layer).__name__]
    widths = [len(p) for p in scales if p is not None and p.dim() == 1 and p.requires_grad and len(p.unique()) > 1]

    def inputs(p: Tensor) -> float:
        width = p.numel() // len(p) if p.dim() > 1 and len(p) > 1 else 1
        return max(width, math.sqrt(len(p))) if any(p is table for table in tables) else width

    first = START_DISPLACEMENT / math.sqrt(sum(map(inputs, parameters)))
    return min(first, PRETRAINED_DISPLACEMENT / math.sqrt(max(widths))) if widths else first


def noise_to_come(schedule: Sequence[float], made: int, momentum: float = 0.0) -> float:
    """kappa s of the module: the noise that a look after ``made`` steps adds to each coordinate, at c = 1.

    Args:
        schedule: what multiplies the rate at each of the T steps.
        momentum: of SGD, which moves by a gradient over many steps: those made have not yet moved all their way.
    """
    ahead = math.fsum(factor**2 for factor in schedule[made:]) / len(schedule)
    way = math.fsum(factor * (1 - momentum ** (made - t)) for t, factor in enumerate(schedule[:made]))
    return math.sqrt(ahead * (way / math.fsum(schedule)) ** NOISE_POWER)


def choose(margin: Callable[[int], float], level: float, needed: float) -> float:
    """The rate to which the votes between neighbours of :data:`LADDER` lead, in units of the first rate.

    From ``level`` it goes up while the margin exceeds ``needed``, or down while minus the margin does, in steps of a
    32nd of an octave. Margins belong to the middles of pairs of rates, and are interpolated between them.

    Args:
        margin: of the j-th rate over the next lower one, positive if the j-th is preferred; called only where needed.
        level, needed: the rate to begin at, and the margin that leads on.
    """

    def margin_at(place: int) -> float:  # 32nds of an octave above the first rate
        pair = VOTES / 2 - 0.5 - place / 32  # pair j lies between rates j and j + 1
        pair = min(max(pair, 0.0), VOTES - 1.0)
        lower = int(pair)
        share = pair - lower
        if share == 0:
            return margin(lower)
        return (1 - share) * margin(lower) + share * margin(lower + 1)

    end = 32 * (VOTES // 2)
    begin = min(max(round(32 * math.log2(level)), -end), end)
    place = begin
    while place < end and margin_at(place) > needed:
        place += 1
    while place > -end and margin_at(place) < -needed:
        place -= 1
    return level if place == begin else 2.0 ** (place / 32)


def _margin(view: BatchView, pair: Tensor, std: float) -> float:
    """The margin between two rates, from the records' losses at both, shape (2, B); ``std`` is that of its noise."""
    size, add_up = view.expected_batch_size, view.processes.add_up
    if view.noise_multiplier == 0:  # how much lower the mean loss is at the former: no record's part must be bounded
        losses = view.batch.weighted(within_floats(pair))
        former, latter = noisy_mean(losses, math.inf, 0.0, size, None, add_up).tolist()
        return float(latter - former)
    (margin,) = privatize_votes(
        pair,
        view.noise_multiplier,
        expected_batch_size=size,
        steepness=max(1.0, CLEAR_MARGIN * std / CLEAR_VOTE),
        weights=view.batch.weights,
        generator=view.generator,
        add_up=add_up,
    )
    return margin


class LookedRate(RateLearner):
    """The learning rate of a run, the weights that its looks compare, and the way back.

    It keeps copies of the weights: their average; until the last look the first; in a step with a look two more.

    Args:
        optimizer: the base optimizer.
        schedule: what multiplies the rate at each of the T steps.
        looks: the steps that begin with one.
        noise_std: of a coordinate of the private gradient; 0 without noise.
        eta: the first rate; None for c_0 / sqrt(T) in units of the optimizer's displacement, see :func:`public_start`.
        layers: of the model, with embeddings and norms.

    Raises:
        ValueError: it is unknown how far this optimizer moves, see :func:`displacement_per_gradient`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Sequence[float],
        looks: Sequence[int],
        noise_std: float,
        eta: float | None,
        layers: Sequence[nn.Module],
    ) -> None:
        steps, groups = len(schedule), optimizer.param_groups
        self._last_look = max(looks, default=0)
        self._parameters, first = trainable(optimizer), float(groups[0]["lr"])
        ratios = [(float(group["lr"]) / first, group["params"]) for group in groups] if first > 0 else []
        self._ratios = [ratio for ratio, parameters in ratios for p in parameters if p.requires_grad]
        displacement, proportional = displacement_per_gradient(optimizer, steps)
        self._reach = math.sqrt(steps) * displacement  # of a coordinate, by the run's noise, at rate and noise 1
        momentum = float(groups[0].get("momentum", 0.0))
        self._to_come = {t: noise_to_come(schedule, t, momentum) for t in looks}
        # Size of a private gradient's coordinates: public where there is noise, else the first gradient's.
        self._unit = (noise_std or math.nan) if proportional else 1.0
        self._first, self._public_start = eta, partial(public_start, self._parameters, layers)
        self._c0 = self._public_start()
        self._steps, self._made = steps, 0
        self._start: list[Tensor] = []
        self._average: list[Tensor] = []
        self._level = 1.0  # of the rate in force, in units of the first
        self._undo: tuple[list[Tensor], float] | None = None  # before a look that is not committed

    @property
    def eta(self) -> float:
        """The rate in force, without decay. NaN before the first gradient where its size sets the unit."""
        return self._first_eta * self._level

    @property
    def _first_eta(self) -> float:
        return self._c0 / (self._reach * self._unit) if self._first is None else self._first

    def on_step_start(self, step: int) -> None:
        """At the first step, keep the weights as those of the start, whose rate they give."""
        self._made = step
        if step == 0:
            self._c0 = self._public_start()  # again, for all processes start as the first
            self._start = [p.detach().clone() for p in self._parameters] if self._last_look else []

    def vote_before_step(self, view: BatchView) -> LookResult:
        """Let the records vote between the rates of the ladder; move half the way to where the votes lead."""
        present = [p.detach().clone() for p in self._parameters]
        ray, before, first = self._ray(present), self._level, self._first_eta
        std = float(loss_noise_std(VOTE_CLIP, view.noise_multiplier, view.expected_batch_size))  # of a margin's noise
        losses: dict[int, Tensor] = {}
        margins: dict[int, float] = {}

        def margin(j: int) -> float:
            for i in (j, j + 1):
                if i not in losses:
                    with view.processes.all_or_none():
                        self._set(torch._foreach_add(self._start, ray, alpha=LADDER[i]))
                        losses[i] = view.batch.losses()
            if j not in margins:
                margins[j] = _margin(view, torch.stack([losses[j], losses[j + 1]]), std)
            return margins[j]

        try:
            found = choose(margin, before, CLEAR_MARGIN * std)
        finally:
            self._set(present)
        view.released()
        self._undo = present, before
        self._level = before * (found / before) ** STRIDE
        along = self._level / before
        if self._made > FIRST_LOOK_STEP:
            along = min(1.0, along)
        if along != 1:
            self._set([start.lerp(p, along) for start, p in zip(self._start, present, strict=True)])
        rates, released = tuple(rung * first for rung in LADDER), tuple(margins.get(j) for j in range(VOTES))
        return LookResult(rates, released, std, found * first, self.eta, along)

    @torch.no_grad()
    def _ray(self, present: list[Tensor]) -> tuple[Tensor, ...]:
        """The way from w_0 at the first rate: what it would have moved so far, and its noise to come, by a public z."""
        public = NoiseGenerator(PUBLIC_SEED).child("look", self._made)
        ray = torch._foreach_sub(present, self._start)
        torch._foreach_div_(ray, self._level)
        displacement = self._first_eta * self._reach * self._unit * self._to_come[self._made]
        for i, (way, ratio) in enumerate(zip(ray, self._ratios, strict=True)):
            z = public.child("z", i).normal(*way.shape, device=way.device)
            way.add_(z.to(way), alpha=displacement * ratio)
        return ray

    def undo(self) -> None:
        """Take a look's move back."""
        if self._undo is not None:
            present, self._level = self._undo
            self._set(present)
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
        if self._made > self._last_look:
            self._start = []
        wide = [p.detach().to(torch.promote_types(p.dtype, torch.float32)) for p in self._parameters]
        if not self._average:
            self._average = [weight.clone() for weight in wide]
        else:
            torch._foreach_lerp_(self._average, wide, (1 + AVERAGE_POWER) / (self._made + AVERAGE_POWER))
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
        weights = {"start": list(self._start), "average": list(self._average)}
        return {"made": self._made, "c0": self._c0, "unit": self._unit, "level": self._level} | weights

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._made, self._c0 = state["made"], state["c0"]
        self._unit, self._level = state["unit"], state["level"]
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

    ValueError for other optimizers, and if momentum, dampening or alpha is 1 or more.
    """
    group = optimizer.param_groups[0]
    if "betas" in group and not isinstance(optimizer, torch.optim.RAdam):  # whose first steps are not normalised
        return 1.0, False
    if not isinstance(optimizer, torch.optim.SGD | torch.optim.RMSprop):
        raise ValueError(
            f"optimizer must be SGD, RMSprop or of Adam's kin but RAdam, for its rate to be learned by looks, got "
            f"{type(optimizer).__name__}, whose steps may be of any size: choose AdamW, or preset='paper' or 'fixed'"
        )
    for name, usual in (("momentum", 0.9), ("dampening", 0), ("alpha", 0.99)):
        if not float(group.get(name, 0.0)) < 1:
            raise ValueError(f"optimizer must have {name} below 1, got {group[name]}: choose {usual}")
    repeated = (1 - float(group.get("dampening", 0.0))) / (1 - float(group.get("momentum", 0.0)))
    if isinstance(optimizer, torch.optim.SGD):
        return repeated, True
    uncorrected = sum(1 / (1 - float(group["alpha"]) ** t) for t in range(1, steps + 1)) / steps
    return repeated * math.sqrt(uncorrected), False
