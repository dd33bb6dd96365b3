"""GroupNorm in place of batch normalisation, which no engine can privatise."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hyfreedp.checks import check_type, listed
from hyfreedp.gradients.validate import is_constant_batch_norm

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_MIN_CHANNELS_PER_GROUP = 4  # with fewer, normalisation leaves little of a small feature map: its signs, or zeros


def replace_batch_norm(model: nn.Module) -> nn.Module:
    """Put a GroupNorm (Wu & He 2018) in place of every batch normalisation, which mixes the samples of a batch.

    The affine weights are kept as the same parameters, under the same names. Statistics of the data are dropped: train
    a little before you trust a pre-trained model again. Layers whose statistics are constants stay: those in eval mode
    with frozen weights, and torchvision's and timm's FrozenBatchNorm.

    A group has at least four channels, and there are at most 32; after BatchNorm1d all channels are one group. timm's
    BatchNormAct2d becomes a sequence of ``norm``, ``drop`` and ``act``, so that its parameters get a longer name.

    Args:
        model: changed in place; before it is made private.

    Returns:
        The model, or the new layer if the model is itself a batch normalisation.

    Raises:
        ValueError: a layer is a batch normalisation of an unknown kind, or a lazy one without its number of channels.
            Nothing is replaced then.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    old: dict[nn.Module, str] = {
        layer: name
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and not is_constant_batch_norm(layer)
    }
    problems = [f"layer {name!r} ({type(layer).__name__}) {why}" for layer, name in old.items() if (why := _why(layer))]
    if problems:
        raise ValueError("replace_batch_norm cannot replace " + listed(problems))
    new = {layer: _group_norm(layer) for layer in old}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in new:
                parent._modules[name] = new[child]
    return new.get(model, model)


def _why(layer: nn.Module) -> str:
    """Why a layer cannot be replaced; empty if it can."""
    if getattr(layer, "num_features", 0) == 0:
        return "which has not seen its number of channels yet: run one batch of random numbers through the model first"
    if type(layer) not in _PLAIN and not _activates(layer):
        return "which is of an unknown kind: replace it by hand"
    return ""


def _activates(layer: nn.Module) -> bool:
    """Whether a layer is timm's batch normalisation with dropout and activation."""
    return dict(layer.named_children()).keys() == {"drop", "act"}


def _group_norm(layer: nn.Module) -> nn.Module:
    assert isinstance(layer, _BatchNorm)
    channels = layer.num_features
    groups = 1
    if not isinstance(layer, nn.BatchNorm1d):
        fitting = (g for g in (32, 16, 8, 4, 2) if channels % g == 0 and channels >= _MIN_CHANNELS_PER_GROUP * g)
        groups = next(fitting, 1)
    norm = nn.GroupNorm(groups, channels, eps=layer.eps, affine=False)
    norm.affine, norm.weight, norm.bias = layer.affine, layer.weight, layer.bias
    norm.train(layer.training)
    if not _activates(layer):
        return norm
    return nn.Sequential(OrderedDict(norm=norm, **dict(layer.named_children()))).train(layer.training)
