"""A check, at the first step, that the loss of a batch follows from the losses of its records.

The loss is mapped over records, each a batch of its own. So a computation *across* a batch silently becomes something
else: the mean over the batch is the record itself, there are no in-batch negatives, and attention along the wrong
dimension sees one token. That is private but useless. So at the first step a few records are also computed as a plain
batch. This protects users from mistakes, not their data: the only result is an error or none.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from hyfreedp.data.batches import Group, Loss
from hyfreedp.errors import Refused
from hyfreedp.gradients.engine import GradientEngine
from hyfreedp.gradients.functorch import is_wrapped
from hyfreedp.gradients.guard import unchanged
from hyfreedp.gradients.mapped import Pass
from hyfreedp.gradients.pieces import Decisions, Partition, Piece
from hyfreedp.noise.random_states import random_states_of, seed_random_states
from hyfreedp.pytorch.layers import eval_mode


@torch.no_grad()
def check_plain_loss(engine: GradientEngine, loss: Loss, partition: Partition, key: bytes) -> bool:
    """ValueError if the loss of a batch is neither its records' losses nor a (weighted) sum or mean of them.

    It is computed in eval mode, with random numbers of ``key``. A loss that draws random numbers or takes only single
    records cannot be compared, and passes. ValueError, too, if the loss takes several records but fails for one, does
    not use its record, or is finite for none. Returns whether it is done; False, to be repeated, for too few records.
    """
    group = max((piece.group for piece in partition.pieces), key=len, default=None)
    if group is None or len(group) < 2:
        return False
    with eval_mode(engine.module.modules()), warnings.catch_warnings(action="ignore"):
        _compare(engine, loss, group.take(slice(0, 3)), partition, key)
    return True


def _compare(engine: GradientEngine, loss: Loss, group: Group, partition: Partition, key: bytes) -> None:
    """ValueError as by :func:`check_plain_loss`, from some records of the batch."""
    together = _loss_together(engine, loss, group, key)
    if together is None:
        return
    alone = _losses_alone(engine, loss, [Piece(group)], key).to(together)
    finite = int(alone.isfinite().sum())
    if not (finite or together.isfinite().any() or _losses_alone(engine, loss, partition.pieces, key).isfinite().any()):
        raise ValueError("no record of the first batch has a finite loss: look for NaN in data, labels and collate_fn")
    if any(_same(together, expected) for expected in (alone, alone.mean()[None], alone.sum()[None])):
        return
    if 0 < finite < len(alone) or (finite == 0 and not together.isfinite().all()):
        return  # a record's loss is not finite
    if alone.any() and not _same(together, _loss_together(engine, loss, group, key + b"again"), 1e-6):
        return  # the loss draws random numbers; but contrasts of one record are 0 whatever it draws
    rows = list(range(len(group)))
    # One number may be a weighted mean: then so is that of any two records, or of one twice.
    subsets = [[i, j] for i in rows for j in rows[i:]] if len(together) == 1 and finite else [rows]
    for some in subsets:
        value, theirs = _loss_together(engine, loss, group.take(torch.tensor(some)), key), alone[some]
        slack = 1e-5 + 1e-3 * theirs.abs().max()
        if value is not None and (len(value) > 1 or not theirs.min() - slack <= value <= theirs.max() + slack):
            raise ValueError(
                f"the loss of a batch must be made of its records' losses alone, but of {len(some)} together it is "
                f"{_listed(value)}, and theirs are {_listed(theirs)}. Each is computed as a batch of its own, "
                "so none sees another: leave out statistics of the batch, put what one is compared with into it "
                "(a pair in place of in-batch negatives), give output and target one shape, use batch_first=True"
            )


def _loss_together(engine: GradientEngine, loss: Loss, group: Group, key: bytes) -> Tensor | None:
    """The loss of n records as one batch, shape (1,) or (n,); None if it cannot be computed."""
    tensors = [t.flatten(0, 1)[None] for t in group.tensors if t.dim() > 1]
    bare = isinstance(group.form, list) and len(group.form) == 1 and isinstance(group.form[0], tuple | list | dict)
    if bare or len(tensors) < len(group.tensors):  # a list of records, or a scalar: no batch dimension to join
        return None
    decisions = Decisions()

    def of_tensors(some: Sequence[Tensor]) -> Tensor:
        value = loss(group.record(some))
        if some and not (group.has_values or decisions.path or is_wrapped(value)) and value.any():  # 0 is for bad ones
            raise Refused("loss must depend on its argument, one record: write x, y = record in it")
        return value

    with random_states_of(key, engine.device), unchanged(engine.module, by_value=True):
        try:  # as one sample of several rows, so that the loss cannot keep a usable tensor of it
            value, _ = Pass([], 1, decisions, memory_budget=0).computed(of_tensors, tensors)
            if decisions.path:  # it must ask for these again
                Pass([], 1, Decisions(decisions.path), memory_budget=0).computed(of_tensors, tensors)
        except Refused:
            raise
        except Exception:  # the loss takes a single record only, or cannot be mapped
            return None
    return value.flatten() if value.is_floating_point() and value.numel() in (1, len(group)) else None


def _losses_alone(engine: GradientEngine, loss: Loss, pieces: list[Piece], key: bytes) -> Tensor:
    """The loss of each of n records, shape (n,)."""
    records = Partition(list(pieces), lambda piece: seed_random_states(key, engine.device))
    try:
        return engine.losses(loss, records)
    except Refused:
        raise
    except Exception as error:
        raise ValueError(
            f"the loss takes several records and fails for one alone, as it is given it: {error}. A .squeeze() "
            "takes the dimension of the batch away, too: write .squeeze(-1)"
        ) from error


def _same(a: Tensor, b: Tensor | None, rtol: float = 1e-3) -> bool:
    return b is not None and a.shape == b.shape and torch.allclose(a, b, rtol, rtol / 100, equal_nan=True)


def _listed(values: Tensor) -> str:
    return ", ".join(f"{value:.6g}" for value in values.tolist())
