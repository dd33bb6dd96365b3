"""The rate of preset "robust": a public start, a linear decay, and private votes that brake it where it is too high.

AdamW on normalised gradients is scale-free, so a share of 1 / sqrt(T), at which the noise of T steps adds up to the
same displacement whatever T is, suits most tasks. For others the records of a batch compare the weights with an average
of those before, a few times in a run: one number of sensitivity 1 (:func:`hyfreedp.privatize.privatize_votes`).

* The *opening* vote, after two steps: the first directions of Adam are signs, four times as long as later ones. If the
  vote is clearly lost, the run begins again from its first weights, and warms up: each direction is scaled by
  1 - beta^t, so that every gradient weighs the same. If it is lost by nearly all records, or if there is no such first
  moment, at half the rate, too.
* The *reviews* compare the weights with the polynomial average of the run so far (Shamir and Zhang, ICML 2013). If the
  average wins, the run goes on from it, at half the rate. At an eighth of the run it begins again from its first
  weights instead, warmed up as steps made so far have it, unless the average wins by no more than after a lost opening.
  Moments of the optimizer stay in all cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hyfreedp.accounting.split import VOTE_CLIP
from hyfreedp.learner import Look, RateLearner
from hyfreedp.privatize import loss_noise_std, privatize_votes
from hyfreedp.running.base_optimizer import trainable
from hyfreedp.running.records import VoteResult

# Measured on validation data of small tasks, see docs/step_rule.md. Users set none of it.
PEAK = 0.3  # of the rate, times sqrt(T), in units of the base optimizer's displacement per gradient
OPENING = 2  # steps before the opening vote
REVIEWS = (0.125, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)  # shares of the run
ROUGH = 8  # steps in which weights are too rough to be judged, unless they are two fifths of the run
OPENING_MARGIN = -0.25  # below which the opening vote is lost
SHATTERED = -0.75  # and below which it is lost by so many that the rate is halved
REVIEW_MARGIN = 0.0  # the same of a review
WARM_REVIEW_MARGIN = 0.2  # and of one after a lost opening: such weights have more to lose
BRAKE = 0.5  # of the rate

CONSTANTS = (PEAK, OPENING, REVIEWS, ROUGH, OPENING_MARGIN, SHATTERED, REVIEW_MARGIN, WARM_REVIEW_MARGIN, BRAKE)


def vote_steps(steps: int) -> tuple[int, ...]:
    """The steps, of a run of ``steps``, whose batch votes before its gradient is taken; fixed in advance."""
    planned = {OPENING, *(round(share * steps) for share in REVIEWS if share * steps >= min(ROUGH, 0.4 * steps))}
    return tuple(sorted(step for step in planned if OPENING <= step < steps))


class VotedRate(RateLearner):
    """The learning rate of a run, the average of weights that its votes compare with, and the way back.

    Memory: a copy of the trained weights, the average, until the last review; the first weights for an eighth of the
    run; and one more while a vote is held.

    Args:
        optimizer: the base optimizer.
        steps: T, length of the run.

    Raises:
        ValueError: it is unknown how far this optimizer moves, see :func:`displacement_per_gradient`.
    """

    kind = "votes"

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        group = optimizer.param_groups[0]
        self.vote_steps = vote_steps(steps)
        # Votes after which the run may begin again; later, it would cost more than it wins.
        self._restarts = {OPENING, round(REVIEWS[0] * steps)} & set(self.vote_steps)
        self._parameters = trainable(optimizer)
        self._made = 0  # steps
        self._peak = PEAK / math.sqrt(steps)
        self._warm = False
        self._review_margin = REVIEW_MARGIN
        self._beta = float(group["betas"][0]) if "betas" in group else None
        self._displacement, proportional = displacement_per_gradient(optimizer, steps)
        self._unit = math.nan if proportional else 1.0  # size of a private gradient's coordinates
        self._start: list[Tensor] = []
        self._average: list[Tensor] = []
        self._averaged = 0  # weights in the average
        # What a lost vote moved, and whether the run begins again.
        self._undo: tuple[tuple[list[Tensor], float, bool, float], bool] | None = None

    @property
    def eta(self) -> float:
        """The rate in force, without decay. NaN before the first gradient where its size sets the unit."""
        warmup = 1 - self._beta ** (self._made + 1) if self._warm and self._beta is not None else 1.0
        return self._peak * warmup / (self._displacement * self._unit)

    def on_step_start(self, step: int) -> None:
        """At the first step, keep the weights as those of the start, and as the first in the average."""
        self._made = step
        if step > 0:
            return
        self._start = [p.detach().clone() for p in self._parameters]
        self._average = [w.to(torch.promote_types(w.dtype, torch.float32), copy=True) for w in self._start]
        self._averaged = 1
        self._tidy()

    def on_gradient(self) -> None:
        """Commit what a lost vote moved; take the unit from the first private gradient, which is in ``.grad``."""
        if self._undo is not None:
            _, again = self._undo
            self._undo = None
            if again:
                torch._foreach_copy_(self._average, self._start)
                self._averaged = 1
        if math.isnan(self._unit):
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            squares = torch.stack([gradient.double().square().sum() for gradient in gradients]).tolist()
            self._unit = math.sqrt(sum(squares) / sum(gradient.numel() for gradient in gradients)) or math.nan

    def before_gradient(self, look: Look) -> VoteResult:
        """Let the records vote between the weights and their average; roll back if the weights lose."""
        with look.processes.all_or_none(), self.at_average():
            rival = look.losses()
        margin = privatize_votes(
            look.here,
            rival,
            look.noise_multiplier,
            expected_batch_size=look.expected_batch_size,
            weights=look.weights,
            generator=look.generator,
            add_up=look.processes.add_up,
        )
        look.released()
        std = float(loss_noise_std(VOTE_CLIP, look.noise_multiplier, look.expected_batch_size))
        needed = OPENING_MARGIN if self._made == OPENING else self._review_margin
        vote = VoteResult(margin, std, needed, margin < needed)
        if vote.lost:
            self._roll_back(vote)
        return vote

    @contextmanager
    def at_average(self) -> Iterator[None]:
        """The weights are the average's, for the length of a ``with``."""
        present = [p.detach().clone() for p in self._parameters]
        try:
            self._set(self._average)
            yield
        finally:
            self._set(present)

    def _roll_back(self, vote: VoteResult) -> None:
        """To the average, or to the first weights, after a vote that was lost."""
        opening = self._made == OPENING
        again = self._made in self._restarts and (opening or vote.margin < REVIEW_MARGIN)
        present = [p.detach().clone() for p in self._parameters]
        self._undo = (present, self._peak, self._warm, self._review_margin), again
        self._set(self._start if again else self._average)
        if not opening or not self._beta or vote.margin < SHATTERED:
            self._peak *= BRAKE
        if again:
            self._warm, self._review_margin = True, WARM_REVIEW_MARGIN if opening else REVIEW_MARGIN

    def undo(self) -> None:
        """Take a roll-back back."""
        if self._undo is not None:
            (present, self._peak, self._warm, self._review_margin), _ = self._undo
            self._set(present)
            self._undo = None

    @torch.no_grad()
    def on_step_end(self) -> None:
        """A step was made: take its weights into the average, the i-th with a weight proportional to i."""
        self._made += 1
        if self._average:
            self._averaged += 1
            present = [p.detach().to(a.dtype) for p, a in zip(self._parameters, self._average, strict=True)]
            torch._foreach_lerp_(self._average, present, 2 / (self._averaged + 1))
        self._tidy()

    def _tidy(self) -> None:
        """Free what no later vote needs."""
        left = [step for step in self.vote_steps if step >= self._made]
        if not any(step in self._restarts for step in left):
            self._start = []
        if not left:
            self._average = []

    @torch.no_grad()
    def _set(self, weights: list[Tensor]) -> None:
        for parameter, weight in zip(self._parameters, weights, strict=True):
            parameter.copy_(weight)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and the live tensors that :meth:`load_state_dict` restores exactly."""
        return {
            "made": self._made,
            "peak": self._peak,
            "warm": self._warm,
            "review_margin": self._review_margin,
            "unit": self._unit,
            "averaged": self._averaged,
            "average": list(self._average),
            "start": list(self._start),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._made, self._peak, self._warm = state["made"], state["peak"], state["warm"]
        self._review_margin = state["review_margin"]
        self._unit, self._averaged = state["unit"], state["averaged"]
        devices = [p.device for p in self._parameters]
        self._average = [a.to(d, copy=True) for a, d in zip(state["average"], devices, strict=False)]
        self._start = [a.to(d, copy=True) for a, d in zip(state["start"], devices, strict=False)]

    def __repr__(self) -> str:
        """All that does not change during a run."""
        return f"{type(self).__name__}{CONSTANTS}, begins again after votes {sorted(self._restarts)}"


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
            f"optimizer must be SGD, RMSprop or of Adam's kin, with betas, for its rate to be learned by votes, got "
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
