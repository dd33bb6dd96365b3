"""The torch optimizer underneath: it turns the private gradient into weights, at our rates and when we say so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hyfreedp.pytorch.layers import parameters_of


def trainable(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The parameters that an optimizer moves, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


class BaseOptimizer:
    """A torch optimizer that steps for its owner only, at a rate given each time.

    Its own step would train on raw gradients, so it is refused. Given to several owners, it obeys the last, who finds
    it at the rates that its user gave it and not at those that the one before has left.

    Args:
        optimizer: over exactly the trainable parameters of ``module``.
        module: the model.
        learned: whether the owner learns the rate; those that others set change nothing then.
        decays: whether the owner lowers it during the run.

    Attributes:
        eta: the rate of the first parameter group as it was given.
        follows: whether steps take the groups' own rates, as a scheduler sets them, whatever they are told.
        parameters: the trainable ones, in the order of the groups.

    Raises:
        ValueError: a rate is not positive.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module, learned: bool, decays: bool) -> None:
        self.optimizer = optimizer
        before: BaseOptimizer | None = getattr(optimizer, "_private_owner", None)
        if before is not None and self.note_rates() == before._rates:
            for group, rate in zip(optimizer.param_groups, before._given, strict=True):
                group["lr"] = rate
        rates = self.note_rates()
        if not all(rate > 0 for rate in rates):
            raise ValueError(f"optimizer must have positive learning rates (their ratios are kept), got {rates}")
        self.eta = rates[0]
        self.follows = not (learned or decays)
        self._learned = learned
        self._given: list[float] = rates
        self.parameters = trainable(optimizer)
        self._module = module
        self._ratios = [rate / rates[0] for rate in rates]
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._stepping = False
        self._warned = False
        if before is None:
            optimizer.register_step_pre_hook(_refuse_raw_steps)
        optimizer._private_owner = self  # type: ignore[attr-defined]

    def check(self) -> None:
        """Refuse a model whose trainable parameters are no longer those that were made private.

        One that was unfrozen since would get no noise; one that was frozen, or replaced, no gradient.
        """
        if self.optimizer._private_owner is not self:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"this {type(self.optimizer).__name__} was made private once more, for another run: make one for each "
                "run, or step what the last make_private_with_epsilon returned"
            )
        if len(self.optimizer.param_groups) != len(self._ratios):
            raise ValueError(
                f"optimizer must keep its {len(self._ratios)} parameter group(s), got "
                f"{len(self.optimizer.param_groups)}: add groups before make_private_with_epsilon"
            )
        known, present = set(map(id, self.parameters)), {id(p): p for p in parameters_of(self._module)}
        changed = [p for p in self.parameters if id(p) not in present or not p.requires_grad]
        changed += [p for key, p in present.items() if p.requires_grad and key not in known]
        if changed:
            key = id(changed[0])
            replaced = "replaced by another tensor, as load_state_dict(assign=True) does,"
            how = "unfrozen" if key not in known else "frozen" if key in present else replaced
            name = {id(p): name for name, p in self._module.named_parameters()}.get(key) or self._names.get(key)
            raise ValueError(
                f"the trainable parameters must stay those that were made private, but {name!r} was {how} since: undo "
                "it, or do it before the optimizer is made and made private"
            )

    def note_rates(self) -> list[float]:
        """Take the groups' rates for those of their owner; returns them."""
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return self._rates

    def sync_scheduler(self) -> None:
        """See whether somebody else, such as a torch scheduler, has set other rates since the last step.

        Warns:
            UserWarning: once, if the rate is learned.

        Raises:
            ValueError: the owner lowers the rate, too.
        """
        mine, owner = self._rates, self.optimizer._private_owner  # type: ignore[attr-defined]
        if self.follows or owner is not self or self.note_rates() == mine or self._warned:
            return
        if self._learned:
            self._warned = True
            warnings.warn(
                "a group's 'lr' was set, as by a learning-rate scheduler, but this run learns its rate: leave the "
                "scheduler out, or choose preset='fixed' to set the rate yourself",
                stacklevel=4,
            )
        else:
            self._rates = mine
            raise ValueError(
                "a group's 'lr' was set, as by a learning-rate scheduler, in a run with a decay of its own: pass "
                "decay='none' to make_private_with_epsilon, or leave the scheduler out"
            )

    def step(self, eta: float) -> None:
        """One step at rate ``eta`` of the first group, the others in proportion."""
        self._set_rates(eta)
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False

    @torch.no_grad()
    def step_along(self, eta: float) -> Callable[[float], None]:
        """One step at rate ``eta``, from w to w - eta G; returns what moves the weights to w - x G for any x.

        Points along G are interpolations between these two, which are both kept, the second in the gradients' memory,
        which is no longer needed. So ``x = eta`` is exactly the plain step.
        """
        start = [parameter.detach().clone() for parameter in self.parameters]
        self.step(eta)
        plain = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        torch._foreach_copy_(plain, self.parameters)
        self.optimizer.zero_grad()  # a backward pass within the loss would add its raw gradient to them

        @torch.no_grad()
        def move(distance: float) -> None:
            self._set_rates(distance)
            torch._foreach_copy_(self.parameters, plain if distance == eta else start)
            if distance != eta:
                torch._foreach_lerp_(self.parameters, plain, distance / eta)

        return move

    def _set_rates(self, eta: float) -> None:
        if self.follows:
            return
        for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = eta * ratio
        self.note_rates()

    def settings(self) -> dict[str, str]:
        """Class, ratios of rates, and each group's settings and parameters by name."""
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
            | {"parameters": [self._names.get(id(p)) for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        return {
            "optimizer": type(self.optimizer).__qualname__,
            "ratios of learning rates": repr(self._ratios),
            **{f"optimizer's group {index}": repr(group) for index, group in enumerate(groups)},
        }


def _refuse_raw_steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not optimizer._private_owner._stepping:  # type: ignore[attr-defined]
        raise RuntimeError(
            f"this {type(optimizer).__name__} was made private, and its own step would train on raw gradients: call "
            "step(loss, batch) of what make_private_with_epsilon returned, without backward()"
        )
