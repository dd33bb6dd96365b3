"""How preset "robust" learns its rate: it starts at a public value, and up to four times the records vote on it.

With AdamW on normalised gradients, the noise of T steps at rate c / sqrt(T) moves each weight by about c, whatever T
is. What that does to a layer's outputs grows with the root of the layer's width, so larger models start at a lower c.

Too high a rate does its harm late, when the noise of many steps has added up. But we know how much noise the remaining
steps will add, so a *look* adds as much in advance. And had the run used c_j instead of c, its weights would have moved
c_j / c times as far, to first order. So a look compares the losses of one batch at the points

    w_0 + (c_j / c) (w - w_0) + kappa c_j s z,    c_j = 32 c_0, 16 c_0, ..., c_0 / 32,

where w_0 are the initial weights, s^2 T is the sum of the squared decay factors of the remaining steps, and z is one
standard normal vector of a public seed. The points lack what the remaining steps will learn, so they get only part of
their noise: kappa^2 = p^(3/4), where p is the share of the schedule that is done. Runs without privacy add it, too.

Each record votes between neighbouring rates, by the relative difference of its losses at both, but by less once these
are far below its loss at w_0 (:func:`hyfreedp.privatize.privatize_votes`). The look starts at the current rate and goes
up, or down, as long as the votes clearly exceed their noise. It releases only the votes that it needs, but the budget
pays for all ten. A look errs by about a factor of two, so the rate goes half of the way, in octaves. At the first look
w - w_0 is scaled with it, up or down; later only down. The run ends at an average of its weights, which acts like a
decay. docs/step_rule.md: reasons and measurements.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hyfreedp.accounting.split import VOTE_CLIP, VOTES
from hyfreedp.learner import RateLearner
from hyfreedp.noise import NoiseGenerator
from hyfreedp.preset import RunPlan
from hyfreedp.privatize import finite, noisy_mean, privatize_votes
from hyfreedp.pytorch.base_optimizer import trainable
from hyfreedp.pytorch.records import LookResult
from hyfreedp.schedule import FIRST_LOOK_STEP, LOOK_SHARES
from hyfreedp.step_batch import StepBatch

# Not options: users set at most the first rate (initial_learning_rate).
START_DISPLACEMENT = 6.0  # how far a run's noise may move the model's outputs at the first rate, see public_start()
PRETRAINED_DISPLACEMENT = 0.55  # the same for the outputs of one layer of a pre-trained model
LADDER = tuple(2.0 ** (VOTES / 2 - j) for j in range(VOTES + 1))  # rates to compare, as multiples of the first
NOISE_POWER = 0.75  # kappa^2 = p^NOISE_POWER, where p is the share of the schedule that is done
CLEAR_MARGIN = 2.0  # a margin counts if it exceeds so many standard deviations of its noise
FLOOR = 0.003  # the floor of a record's votes over its loss at w_0, so that solved records count little
CLEAR_VOTE = 0.05  # where noise would hide a margin of this size, votes are made steeper
MOVED_FRACTION = 0.5  # the rate moves this fraction of the way, in octaves, to the one that the votes choose
AVERAGE_POWER = 8.0  # weights after t steps count about as t^8 in the average (Shamir & Zhang 2013)
PUBLIC_SEED = 0  # of z, which protects nothing and may be known

CONSTANTS: tuple[Any, ...] = (START_DISPLACEMENT, PRETRAINED_DISPLACEMENT, LADDER, FIRST_LOOK_STEP, LOOK_SHARES)
CONSTANTS += (NOISE_POWER, CLEAR_MARGIN, FLOOR, CLEAR_VOTE, MOVED_FRACTION, AVERAGE_POWER, PUBLIC_SEED)


def public_start(parameters: Sequence[Tensor], layers: Sequence[nn.Module] = (), ratios: Sequence[float] = ()) -> float:
    """c_0: how far the noise of a whole run moves each weight at the first rate, as a standard deviation.

    If each weight moves by c_0, an output of a layer with n inputs of size 1 moves by c_0 sqrt(n), and variances add up
    over the layers. So c_0 = ``START_DISPLACEMENT`` / sqrt(sum of n over ``parameters``), which is public. n is the
    number of entries of a row ``p[0]``; for a vector, or if dimension 0 has size 1, n = 1. If parameters have other
    rates than the first group, to which c_0 belongs, n counts by the square of their ``ratios``.

    For an embedding table (in ``layers``) of V rows, of which a record uses 1 to V, n is the geometric mean sqrt(V);
    in a transformer V / 2 (measured: a norm enlarges the noise of rows before a mean reduces it); but at least the
    width of a row, since a product of two rows has so many terms.

    The weights of trainable norms tell the kind of model. If their entries differ, it is pre-trained, and the noise
    must not destroy what it has learned: c_0 sqrt(width of the norm) is at most ``PRETRAINED_DISPLACEMENT``. If they
    are equal, tables of this width are those of a transformer. Frozen norms, as with LoRA, tell nothing.
    """
    ratio = dict(zip(parameters, ratios or [1.0] * len(parameters), strict=True))
    tables = {layer.weight for layer in layers if isinstance(layer, nn.Embedding | nn.EmbeddingBag)}
    scales = [layer._parameters.get("weight") for layer in layers if "Norm" in type(layer).__name__]
    trained = [p for p in scales if p is not None and p.dim() == 1 and p.requires_grad]
    pretrained = [p for p in trained if len(p.unique()) > 1]
    fresh = {len(p) for p in trained} - {len(p) for p in pretrained}

    def inputs(p: Tensor) -> float:
        width = p.numel() // len(p) if p.dim() > 1 and len(p) > 1 else 1
        if p not in tables:
            return width
        rows = len(p) / 2 if width in fresh else math.sqrt(len(p))
        return max(width, rows)

    first = START_DISPLACEMENT / math.sqrt(sum(ratio[p] ** 2 * inputs(p) for p in parameters))
    largest = max([ratio[p] ** 2 * len(p) for p in pretrained], default=0.0)
    return min(first, PRETRAINED_DISPLACEMENT / math.sqrt(largest)) if largest else first


def noise_to_come(schedule: Sequence[float], made: int, momentum: float = 0.0) -> float:
    """kappa s of the module docstring: by how much noise a look after ``made`` steps moves each weight, at c = 1.

    Args:
        schedule: the decay's factor on the rate, for each of the T steps.
        momentum: beta: a gradient acts over many steps, so the latest ones have not yet had their whole effect.
    """
    ahead = math.fsum(factor**2 for factor in schedule[made:]) / len(schedule)
    done = math.fsum(factor * (1 - momentum ** (made - t)) for t, factor in enumerate(schedule[:made]))
    return math.sqrt(ahead * (done / math.fsum(schedule)) ** NOISE_POWER)


def choose(margin: Callable[[int], float], level: float, needed: float) -> float:
    """The rate to which the votes lead, as a multiple of the first rate, within :data:`LADDER`.

    From ``level`` it goes up while the margin is above ``needed``, or down while it is below ``-needed``, in steps of
    1/32 octave. A margin belongs to the geometric mean of its two rates; between such points margins are interpolated.

    Args:
        margin: ``margin(j)`` is positive if ``LADDER[j]`` is preferred to ``LADDER[j + 1]``; called only where needed.
        level, needed: the current rate, as a multiple of the first one; the smallest margin that counts.
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


def _margin(batch: StepBatch, pair: Tensor, floors: Tensor | None, std: float) -> float:
    """Release the margin between two rates, from the losses at both, shape (2, B); ``std`` is that of its noise."""
    if std == 0:  # without privacy the margin is the difference of the mean losses
        former, latter = noisy_mean(batch.weighted(finite(pair)), math.inf, **batch.terms).tolist()
        return float(latter - former)
    steepness = max(1.0, CLEAR_MARGIN * std / CLEAR_VOTE)
    return privatize_votes(pair, floors=floors, steepness=steepness, weights=batch.weights, **batch.terms)[0]


class LookedRate(RateLearner):
    """Learns the rate of preset "robust" by looks, as the module docstring says, and averages the weights.

    It keeps copies of the weights: their average; the initial ones until the last look; two more during a look's step.

    Args:
        plan: of the run. Without an initial rate it starts where its noise moves weights by :func:`public_start`.
        module: the model.
        optimizer: the base optimizer; ValueError for one that :func:`displacement_per_gradient` does not know.
        noise_std: standard deviation of the noise in each entry of the private gradient; 0 without privacy.
    """

    def __init__(self, plan: RunPlan, module: nn.Module, optimizer: torch.optim.Optimizer, noise_std: float) -> None:
        groups = optimizer.param_groups
        first = float(groups[0]["lr"]) or math.nan  # 0 is refused later
        self._parameters = trainable(optimizer)
        self._ratios = [float(group["lr"]) / first for group in groups for p in group["params"] if p.requires_grad]
        self._steps, looks = plan.split.steps, plan.split.vote_steps
        self._last_look = max(looks, default=0)
        schedule = [plan.rate_factor(t) for t in range(self._steps)]
        self._noise_to_come = {t: noise_to_come(schedule, t, float(groups[0].get("momentum", 0.0))) for t in looks}
        displacement, proportional = displacement_per_gradient(optimizer, self._steps)
        self._reach = math.sqrt(self._steps) * displacement  # how far noise of size 1 moves a weight at rate 1
        # The size of the gradient's entries, which matters to SGD alone: that of their noise; without noise that of the
        # first gradient, NaN before it.
        self._unit = (noise_std or math.nan) if proportional else 1.0
        self._first = plan.preset.initial_learning_rate
        self._public = self._parameters, list(module.modules()), self._ratios
        self._c0 = public_start(*self._public)
        self._steps_made, self._level = 0, 1.0  # the level is the current rate as a multiple of the first
        self._start: list[Tensor] = []  # the initial weights, until the last look
        self._average: list[Tensor] = []
        self._shown = False  # whether the model has the average
        self._undo: tuple[list[Tensor], float] | None = None  # weights and level before a look, while it can be undone

    @property
    def eta(self) -> float:
        """The current rate, without decay. NaN for SGD without noise until the first gradient that is not zero."""
        return self._first_eta * self._level

    @property
    def _first_eta(self) -> float:
        return self._c0 / (self._reach * self._unit) if self._first is None else self._first

    def on_step_start(self, step: int) -> None:
        """At the first step, keep the initial weights and compute the first rate."""
        self._refuse_averaged()
        self._steps_made = step
        if step == 0:
            self._c0 = public_start(*self._public)  # again: now all processes have rank 0's weights
            self._start = [p.detach().clone() for p in self._parameters] if self._last_look else []

    def vote_before_step(self, batch: StepBatch) -> LookResult:
        """Let the records vote on the rates of the ladder, and move rate and weights half of the way that they lead."""
        present = [p.detach().clone() for p in self._parameters]
        ray, level, first = self._ray(present), self._level, self._first_eta
        std = batch.noise_std(VOTE_CLIP)  # of a margin's noise
        floors: Tensor | None = None  # without privacy records do not vote
        margins: dict[int, float] = {}

        @cache
        def losses_at(j: int) -> Tensor:
            return batch.losses(lambda: self._set(torch._foreach_add(self._start, ray, alpha=LADDER[j])))

        def margin(j: int) -> float:
            if j not in margins:  # each is released once
                margins[j] = _margin(batch, torch.stack([losses_at(j), losses_at(j + 1)]), floors, std)
            return margins[j]

        self._undo = present, level
        if std > 0:
            floors = FLOOR * batch.losses(lambda: self._set(self._start)).abs()
        chosen = choose(margin, level, CLEAR_MARGIN * std)
        batch.released()
        self._level = level * (chosen / level) ** MOVED_FRACTION
        along = self._level / level
        if self._steps_made > FIRST_LOOK_STEP:
            along = min(1.0, along)
        self._set(present if along == 1 else [w.lerp(p, along) for w, p in zip(self._start, present, strict=True)])
        rates, released = tuple(rung * first for rung in LADDER), tuple(margins.get(j) for j in range(VOTES))
        return LookResult(rates, released, std, chosen * first, self.eta, along)

    @torch.no_grad()
    def _ray(self, present: list[Tensor]) -> tuple[Tensor, ...]:
        """r, such that the points to compare are w_0 + (c_j / c_0) r: the steps so far and the noise to come."""
        public = NoiseGenerator(PUBLIC_SEED).child("look", self._steps_made)
        ray = torch._foreach_sub(present, self._start)
        torch._foreach_div_(ray, self._level)
        displacement = self._first_eta * self._reach * self._unit * self._noise_to_come[self._steps_made]
        for i, (direction, ratio) in enumerate(zip(ray, self._ratios, strict=True)):
            z = public.child("z", i).normal(*direction.shape, device=direction.device)
            direction.add_(z.to(direction), alpha=displacement * ratio)
        return ray

    def undo(self) -> None:
        """Restore weights and rate from before a look that is not committed."""
        if self._undo is not None:
            present, self._level = self._undo
            self._set(present)
            self._undo = None

    def on_gradient(self, gradient: Sequence[Tensor]) -> None:
        """Commit the look of this step; for SGD without noise, also measure the first gradient."""
        self._undo = None
        if math.isnan(self._unit):
            squares = torch.stack([part.double().square().sum() for part in gradient]).tolist()
            self._unit = math.sqrt(sum(squares) / sum(part.numel() for part in gradient)) or math.nan

    @torch.no_grad()
    def on_step_end(self) -> None:
        """Add the weights after a step to the average; after the last step the model gets the average."""
        self._steps_made += 1
        if self._steps_made > self._last_look:
            self._start = []
        wide = [p.detach().to(torch.promote_types(p.dtype, torch.float32)) for p in self._parameters]
        if not self._average:
            self._average = [weight.clone() for weight in wide]
        else:
            torch._foreach_lerp_(self._average, wide, (1 + AVERAGE_POWER) / (self._steps_made + AVERAGE_POWER))
        if self._steps_made == self._steps:
            self._set(self._average)
            self._average = []

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model has the averaged weights."""
        present, shown, self._shown = [p.detach().clone() for p in self._parameters], self._shown, True
        try:
            self._set(self._average or present)
            yield
        finally:
            self._set(present)
            self._shown = shown

    def _refuse_averaged(self) -> None:
        if self._shown:
            raise RuntimeError("averaged() gives weights to evaluate and save: leave it before a step or a checkpoint")

    @torch.no_grad()
    def _set(self, weights: list[Tensor] | tuple[Tensor, ...]) -> None:
        torch._foreach_copy_(self._parameters, weights)

    def state_dict(self) -> dict[str, Any]:
        self._refuse_averaged()
        weights = {"start": list(self._start), "average": list(self._average)}
        return {"c0": self._c0, "unit": self._unit, "level": self._level} | weights

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._c0, self._unit, self._level = state["c0"], state["unit"], state["level"]
        self._start = [w.to(p.device, copy=True) for w, p in zip(state["start"], self._parameters, strict=False)]
        self._average = [w.to(p.device, copy=True) for w, p in zip(state["average"], self._parameters, strict=False)]

    def __repr__(self) -> str:
        """All that does not change during a run."""
        return f"{type(self).__name__}{CONSTANTS}, from {self._first}"


def displacement_per_gradient(optimizer: torch.optim.Optimizer, steps: int) -> tuple[float, bool]:
    """How far one gradient moves each weight in all, at rate 1, and whether in proportion to the gradient's size.

    Adam and its variants normalise each entry to size 1: (1.0, False). So does RMSprop, but without bias correction: to
    size (1 - alpha^t)^(-1/2) at step t, whose root mean square over ``steps`` counts. SGD does not: (1.0, True).
    Momentum beta applies a gradient 1 / (1 - beta) times in all. The first parameter group counts.

    ValueError for other optimizers, and if momentum, dampening or alpha is 1 or more.
    """
    group = optimizer.param_groups[0]
    if "betas" in group and not isinstance(optimizer, torch.optim.RAdam):  # RAdam does not normalise its first steps
        return 1.0, False
    if not isinstance(optimizer, torch.optim.SGD | torch.optim.RMSprop):
        raise ValueError(
            "optimizer must be SGD, RMSprop or a variant of Adam other than RAdam if its rate is learned by looks, got "
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
