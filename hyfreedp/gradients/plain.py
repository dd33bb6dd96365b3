"""Is the loss of a batch made of its records' losses? Looked at once, for the user's sake.

The loss is mapped over records, each a batch of its own. What it would compute *across* a batch is silently something
else then: a mean over the batch that is subtracted is the record itself, in-batch negatives are none, attention along
the wrong dimension sees one token. That is private, and useless. So at the first step a few records are computed as a
plain batch, too. Nothing here guards privacy: nothing but "yes" or an error comes of it.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from hyfreedp.errors import Refused
from hyfreedp.gradients.engine import Piece, Plan
from hyfreedp.gradients.mapped import Pass
from hyfreedp.gradients.step_batch import StepBatch
from hyfreedp.noise.random_states import random_states_of
from hyfreedp.pytorch.layers import eval_mode, layers_of

_RECORDS = 3


@torch.no_grad()
def check_plain_loss(passes: StepBatch, module: nn.Module, key: bytes) -> bool:
    """Refuse a loss of which a batch's is neither its records' losses, nor their sum or mean, of any weights.

    Dropout rests meanwhile. Where nothing can be compared, as of a loss that draws random numbers or takes one record
    only, nothing is refused.

    Args:
        passes: a batch and its loss.
        module: the model.
        key: of random numbers.

    Returns:
        Whether there were records to compare.

    Raises:
        ValueError: what differs, and what it means; or the loss fails for a record alone where it takes several.
    """
    group = max((piece.group for piece in passes.plan.pieces), key=len, default=None)
    if group is None or len(group) < 2 or passes.owners:
        return passes.owners
    group = group.take(slice(0, _RECORDS))
    everybody = list(range(len(group)))

    def of(rows: list[int], key: bytes = key) -> Tensor | None:
        """The loss of some records as one batch: a number, or one for each; None where it cannot be computed."""
        tensors = [t.flatten(0, 1) for t in group.take(torch.tensor(rows)).tensors if t.dim() > 1]
        if len(tensors) < len(group.tensors):  # a number for a record, which has no rows to join
            return None
        with random_states_of(key, passes.device), passes.guard.unchanged(by_value=True):
            try:  # as one sample of several rows: of what the loss keeps of it, no tensor can be used later
                one_pass = Pass([], 1, memory_budget=0)
                value = one_pass.losses(lambda some: passes.loss(group.record(some)), [t[None] for t in tensors])
            except Refused:
                raise
            except Exception:  # of a loss that takes one record alone, or cannot be mapped
                return None
        return value.flatten() if value.numel() in (1, len(rows)) else None

    with eval_mode(layers_of(module)), warnings.catch_warnings(action="ignore"):
        if (plain := of(everybody)) is None:
            return True
        try:
            alone = passes.of_few(Plan([Piece(group)]), key).to(plain)
        except Refused:
            raise
        except Exception as error:
            raise ValueError(
                f"the loss takes several records and fails for one alone, as it is given it: {error}. A .squeeze() "
                "takes the dimension of the batch away, too: write .squeeze(-1)"
            ) from error
        if any(_same(plain, one) for one in (alone, alone.mean()[None], alone.sum()[None])):
            return True
        if not _same(plain, of(everybody, key + b"again")) or not bool(alone.isfinite().all()):
            return True
        pairs = [[i, j] for i in everybody for j in everybody[i:]]
        wrong = everybody if len(plain) > 1 else next((rows for rows in pairs if _outside(of(rows), alone[rows])), None)
    if wrong is not None:
        raise ValueError(
            f"the loss of a batch must be made of its records' losses alone, but of {len(wrong)} together it is "
            f"{_told(of(wrong))}, and theirs are {_told(alone[wrong])}. Each is computed as a batch of its own, so "
            "that none sees another: a mean or statistic over the batch, in-batch negatives, or a layer that takes "
            "another dimension for the batch's (batch_first=False) give something else then"
        )
    return True


def _outside(value: Tensor | None, alone: Tensor) -> bool:
    """Whether one number is no mean of others, of whatever weights."""
    slack = 1e-5 + 1e-3 * alone.abs().max()
    return value is not None and not bool(alone.min() - slack <= value <= alone.max() + slack)


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.allclose(one, other, 1e-3, 1e-5, equal_nan=True)


def _told(values: Tensor | None) -> str:
    return "" if values is None else ", ".join(f"{one:.6g}" for one in values.tolist())
