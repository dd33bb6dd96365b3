"""The wrapped torch optimizer, which turns the private gradient into an update at the rate that it is given."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def trainable(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The trainable parameters of an optimizer, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


class BaseOptimizer:
    """Steps a torch optimizer at a given rate. Its own ``step``, which would use raw gradients, raises an error.

    If an optimizer is wrapped again, the newest wrapper owns it, and starts from the learning rates that the user set.

    Args:
        optimizer, module: the optimizer, with positive rates, over exactly the trainable parameters of the model.
        learned: whether the run learns the rate, so that rates set by others are ignored.
        decays: whether the run itself lowers the rate.

    Attributes:
        follows: whether steps use the groups' own rates (as a scheduler sets them) instead of the one given.
        parameters: the trainable ones, in the order of the groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module, *, learned: bool, decays: bool) -> None:
        self.optimizer, self._module, self.parameters = optimizer, module, trainable(optimizer)
        self.follows, self._learned = not (learned or decays), learned
        before: BaseOptimizer | None = getattr(optimizer, "_private_owner", None)
        rates = _rates_of(optimizer)
        if before is not None and rates == before._last_rates:  # an earlier run has set them, not the user
            rates = before._initial_rates
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        if learned and len(set(rates)) == 1 and len({group.get("lr_scale") for group in optimizer.param_groups}) > 1:
            raise ValueError(
                "optimizer's groups have an 'lr_scale', which only timm's schedulers apply: multiply each 'lr' by it"
            )
        if learned and any(group.get("maximize") for group in optimizer.param_groups):
            raise ValueError("optimizer must not have maximize=True if its rate is learned: return the loss times -1")
        if not all(rate > 0 for rate in rates):
            why = "whose ratios are kept: make a warm-up scheduler afterwards"
            raise ValueError(f"optimizer must have positive learning rates, {why}; got {rates}")
        self._initial_rates: list[float] = rates
        self._last_rates: list[float] = rates
        self._ratios = [rate / rates[0] for rate in rates]
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._stepping = self._warned = False  # whether its own step is allowed; whether rates were warned of
        if before is None:
            optimizer.register_step_pre_hook(_refuse_raw_steps)
        optimizer._private_owner = self  # type: ignore[attr-defined]

    @property
    def eta(self) -> float:
        """The first group's initial rate, or its current one if the optimizer ``follows`` a scheduler."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.follows else self._initial_rates[0]

    def check(self) -> None:
        """Refuse a model whose trainable parameters have changed, and an optimizer that another run has taken over.

        A parameter unfrozen since would get no noise; one frozen or replaced would get no gradient. Rates that a
        scheduler has set are ignored, with a warning, if the run learns its own, and refused if it has its own decay.
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
        if self.optimizer.defaults.get("capturable") and self.parameters[0].device.type == "cpu":
            raise ValueError("optimizer must not have capturable=True on a CPU: leave it out")
        if "eps" in self.optimizer.defaults and any(p.dtype == torch.float16 for p in self.parameters):
            raise ValueError(
                f"trained parameters must not be float16 with {type(self.optimizer).__name__}, whose eps or squares "
                "underflow: call module.bfloat16(), or float() and torch.autocast(..., dtype=torch.bfloat16)"
            )
        self._check_rates()
        private, present = {id(p): p for p in self.parameters}, {id(p): p for p in self._module.parameters()}
        replaced = "replaced by another tensor, as load_state_dict(assign=True) does,"
        changes = {
            replaced: [key for key in private if key not in present],
            "frozen": [key for key, p in private.items() if not p.requires_grad],
            "unfrozen": [key for key, p in present.items() if p.requires_grad and key not in private],
        }
        for change, keys in changes.items():
            if keys:
                names = self._names | {id(p): name for name, p in self._module.named_parameters()}
                raise ValueError(
                    f"the trainable parameters must stay those that were made private, but {names[keys[0]]!r} was "
                    f"{change} since: undo it, or do it before the optimizer is made and made private"
                )

    def clear_gradients(self) -> None:
        """As ``zero_grad``, but not labelled in profiles."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def note_rates(self) -> None:
        """Remember that the groups' current rates were set here."""
        self._last_rates = _rates_of(self.optimizer)

    def _check_rates(self) -> None:
        if self.follows or self._warned or _rates_of(self.optimizer) == self._last_rates:
            return
        if not self._learned:
            raise ValueError(
                "a group's 'lr' was set, as by a learning-rate scheduler, in a run with a decay of its own: pass "
                "decay='none' to make_private_with_epsilon, or leave the scheduler out"
            )
        self._warned = True
        warnings.warn(
            "a group's 'lr' was set, as by a learning-rate scheduler, but this run learns its rate: leave the "
            "scheduler out, or choose preset='fixed' to set the rate yourself",
            stacklevel=6,
        )

    def step(self, gradient: Sequence[Tensor], eta: float) -> None:
        """One step by the private gradient, with rate ``eta`` for the first group, proportional ones for the others."""
        self.clear_gradients()  # a loss may have made raw ones, even of frozen parameters
        for parameter, part in zip(self.parameters, gradient, strict=True):
            parameter.grad = part
        self._set_rates(eta)
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False

    @torch.no_grad()
    def step_along(self, gradient: Sequence[Tensor], eta: float) -> Callable[[float], None]:
        """One step at rate ``eta``, from w to w - eta G; returns a function of x that sets the weights to w - x G.

        Both w and w - eta G are kept, the latter in the gradients' memory, and other points are interpolated. So
        ``x = eta`` gives exactly the weights of a plain step.
        """
        start = [parameter.detach().clone() for parameter in self.parameters]
        self.step(gradient, eta)
        plain = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        torch._foreach_copy_(plain, self.parameters)
        self.clear_gradients()  # a backward pass within the loss would add raw gradients to this memory

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
        """What must be equal in a resumed run: class, ratios of rates, each group's settings and parameter names."""
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
