"""Refuses models that cannot be trained privately: with layers that mix samples, or write into the model."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from hyfreedp.checks import listed
from hyfreedp.pytorch.devices import rounds_products


def check_module(module: nn.Module) -> None:
    """ValueError for a module that cannot be trained privately. Called before a run, and at every step: it may change.

    The message names layers and remedy, or says that nothing is trainable, that parameters are complex, have hooks or
    are on several devices, or that float32 products are rounded. A frozen batch norm in eval mode is allowed.
    """
    if rounds_products():
        raise ValueError(
            "torch is set to round the factors of float32 products (TF32, bfloat16), so that a clipped gradient may be "
            "larger than its norm says: call torch.set_float32_matmul_precision('highest'), and leave fp32_precision "
            "of torch.backends at 'none' or 'ieee'; autocast is not concerned"
        )
    problems = {layer: _problem(layer) for layer in module.modules()}
    parameters = [p for layer in problems for p in layer._parameters.values() if p is not None]
    if len(devices := {*map(str, {p.device for p in parameters})}) > 1:  # only one's random numbers would be secret
        raise ValueError(f"all parameters must be on one device, got {', '.join(sorted(devices))}: call module.to(...)")
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise ValueError("no parameter is trainable: set requires_grad on those to train")
    if any(p.is_complex() for p in trained):
        name = next(name for name, p in module.named_parameters() if p.requires_grad and p.is_complex())
        raise ValueError(f"parameter {name!r} is complex, and noise is real: train a real one, and view_as_complex it")
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in trained):
        raise ValueError("trained parameters must have no hooks, which are skipped: freeze a part by a mask in forward")
    if any(problems.values()):
        named = [(name, layer) for name, layer in module.named_modules() if problems[layer]]
        texts = [f"layer {name!r} ({type(layer).__name__}) {problems[layer]}" for name, layer in named]
        raise ValueError("this module cannot be trained privately: " + listed(texts))


def is_constant_batch_norm(layer: _BatchNorm) -> bool:
    """Whether a batch normalisation is a fixed affine map: in eval mode, with frozen weights."""
    frozen = not any(p.requires_grad for p in layer.parameters())
    return frozen and layer.track_running_stats and not layer.training


def _problem(layer: nn.Module) -> str | None:
    if isinstance(layer, _BatchNorm) and not is_constant_batch_norm(layer):
        return (
            "normalises each sample by the others in its batch: call hyfreedp.replace_batch_norm(model) before the "
            "optimizer is made, or freeze it and keep it in eval mode (after model.train(), call its .eval() again)"
        )
    if type(layer).get_extra_state is not nn.Module.get_extra_state:
        return "publishes objects by get_extra_state, which may hold raw data: let it keep buffers instead"
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        return "keeps running statistics of the data without noise: set track_running_stats=False"
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
        return "renormalises the rows that it looks up, also where it is frozen: set max_norm=None"
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.weight.requires_grad and layer.sparse:
        return "has sparse gradients, which cannot hold noise: set sparse=False"
    return None
