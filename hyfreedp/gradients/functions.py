"""``torch.autograd.Function`` within a map: forward and backward of a Function of the loss see one sample each.

They are called with samples' tensors, and with a ctx of their own. Outside of the map another Function joins the
outputs to the inputs, so that the one backward pass of all samples reaches the loss's own backward.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx, once_differentiable

from hyfreedp.gradients import functorch, operations
from hyfreedp.gradients.functorch import is_wrapped
from hyfreedp.gradients.mapped import Pass, replaces
from hyfreedp.gradients.pieces import Unmappable

_SAVES_INPUTS: Any = getattr(torch.utils.checkpoint, "_NoopSaveInputs", object)  # a checkpoint's, before torch 2.12


@replaces(functorch.custom_function_call)
def _applied(one_pass: Pass, _: Any, function: Any, *args: Any) -> Any:
    """The outputs of ``function.apply(*args)``, as samples' tensors.

    Unmappable if it writes into its inputs, returns a tensor twice, or gets its gradients as lists.
    """
    if function is _SAVES_INPUTS:
        with one_pass.level.left():
            return function.apply(*args)
    if not one_pass.level.is_innermost():
        return NotImplemented
    own: Any = FunctionCtx()
    args = one_pass.repeated(args)
    inputs = [one_pass.samples(t) if is_wrapped(t) or getattr(t, "requires_grad", False) else None for t in args]
    own.needs_input_grad = tuple(x is not None and x.requires_grad for x in inputs)
    with torch.no_grad(), one_pass:
        if function.setup_context is Function.setup_context:
            outputs = function.forward(own, *args)
        else:
            outputs = function.forward(*args)
            function.setup_context(own, args, outputs)
    returned = operations.tensors_in(outputs)
    twice = len({id(t) for t in returned}) < len(returned)
    if hasattr(own, "dirty_tensors") or getattr(function, "boxed_grads_call", False) or twice:
        raise Unmappable(f"{function.__name__}, which writes into its inputs, returns one twice, or gets lists")
    if not torch.is_grad_enabled():
        return outputs
    several = isinstance(outputs, tuple)
    with one_pass.level.left():
        rows = _Joined.apply(one_pass, function, own, outputs if several else (outputs,), *inputs)
    found = tuple(one_pass.of_sample(y) if isinstance(y, Tensor) else y for y in rows)
    return found if several else found[0]


class _Joined(Function):
    """Joins the outputs of a Function of the loss, with its ctx ``own``, to its ``inputs`` (B, ...)."""

    @staticmethod
    def forward(ctx: Any, one_pass: Any, function: Any, own: Any, outputs: Any, *inputs: Tensor | None) -> Any:
        ctx.one_pass, ctx.function, ctx.own = one_pass, function, own
        ctx.shapes = [None if x is None else x.shape[1:] for x in inputs]
        saved, fixed = (vars(own).pop(name, ()) for name in ("to_save", "non_differentiable"))
        for t in operations.tensors_in(saved, outputs):
            one_pass.check(t)
        ctx.mapped = [is_wrapped(t) for t in saved]
        ctx.save_for_backward(*(one_pass.level.samples(t).detach() if is_wrapped(t) else t for t in saved))
        ctx.set_materialize_grads(vars(own).get("materialize_grads", True))
        rows = list(outputs)
        for i, y in enumerate(outputs):
            if isinstance(y, Tensor):
                rows[i] = one_pass.samples(y).detach() if is_wrapped(y) else one_pass.samples(y).clone()
        ctx.mark_non_differentiable(*(rows[i] for i, y in enumerate(outputs) if any(y is one for one in fixed)))
        return tuple(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        one_pass, own, saved = ctx.one_pass, ctx.own, zip(ctx.saved_tensors, ctx.mapped, strict=True)
        own.saved_tensors = tuple(one_pass.of_sample(t) if mapped else t for t, mapped in saved)
        with nullcontext() if one_pass.checkpoints else one_pass.entered():
            found = ctx.function.backward(own, *(g if g is None else one_pass.of_sample(g) for g in gradients))
            pairs = zip(found if isinstance(found, tuple) else (found,), ctx.shapes, strict=False)
            summed = [None if g is None or shape is None else g.sum_to_size(shape) for g, shape in pairs]
        del own.saved_tensors
        with one_pass.level.left():
            return None, None, None, None, *(g if g is None else one_pass.samples(g).detach() for g in summed)
