"""GroupNorm instead of batch normalisation, which mixes samples and cannot be made private."""

from collections import OrderedDict

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hyfreedp.checks import check_type
from hyfreedp.gradients.validate import is_constant_batch_norm

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_MIN_CHANNELS_PER_GROUP = 4  # with fewer, normalisation leaves only signs, or zeros, of a small feature map


def replace_batch_norm(model: nn.Module) -> nn.Module:
    """Replace every batch normalisation, which mixes the samples of a batch, by a GroupNorm (Wu & He 2018).

    The affine weights stay the same parameters, under the same names. The running statistics are lost, so a pre-trained
    model needs some training before it works again. Layers with constant statistics stay: those in eval mode with
    frozen weights, and torchvision's and timm's FrozenBatchNorm.

    There are at most 32 groups, of at least four channels; for BatchNorm1d there is one group of all channels. timm's
    BatchNormAct2d becomes a sequence of ``norm``, ``drop`` and ``act``, so the names of its parameters get longer.

    Args:
        model: changed in place; before it is made private.

    Returns the model, or the new layer if the model is itself a batch normalisation. ValueError, and nothing is
    replaced, if a layer is a batch normalisation of an unknown kind, or a lazy one without its number of channels.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    new: dict[nn.Module, nn.Module] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and not is_constant_batch_norm(layer):
            new[layer] = _group_norm(name, layer)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in new:
                parent._modules[name] = new[child]
    return new.get(model, model)


def _group_norm(name: str, layer: _BatchNorm) -> nn.Module:
    """The layer in place of one; ValueError, with its ``name``, if there is none."""
    cannot = f"replace_batch_norm cannot replace layer {name!r} ({type(layer).__name__}), which"
    channels = getattr(layer, "num_features", 0)
    if channels == 0:
        raise ValueError(
            f"{cannot} has not seen its number of channels yet: run one batch of random numbers through the model first"
        )
    activates = dict(layer.named_children()).keys() == {"drop", "act"}  # timm's, with dropout and activation
    if type(layer) not in _PLAIN and not activates:
        raise ValueError(f"{cannot} is of an unknown kind: replace it by hand")
    groups = 1
    if not isinstance(layer, nn.BatchNorm1d):
        fitting = (g for g in (32, 16, 8, 4, 2) if channels % g == 0 and channels >= _MIN_CHANNELS_PER_GROUP * g)
        groups = next(fitting, 1)
    norm = nn.GroupNorm(groups, channels, eps=layer.eps, affine=False)
    norm.affine, norm.weight, norm.bias = layer.affine, layer.weight, layer.bias
    norm.train(layer.training)
    if not activates:
        return norm
    return nn.Sequential(OrderedDict(norm=norm, **dict(layer.named_children()))).train(layer.training)
