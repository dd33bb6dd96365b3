"""Classifiers, and which of their parameters are trained: all, biases and head (BitFit), or low-rank updates (LoRA).

The public ViTs were pre-trained on ImageNet-21k with augmentation ("augreg", Steiner et al., 2022) and are fine-tuned
as in the authors' public script (awslabs/fast-differential-privacy, examples/image_classification/CV_TIMM.py): images
resized to 224 x 224, pixels normalised with mean and standard deviation 0.5, which are no statistics of private data.
Three small ViTs start from weights of our own (``tools/weights/pretrain.py``). The head of every ViT starts at zero, as
in Dosovitskiy et al. (2021).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyfreedp.experiments.models import public_weights as weights
from hyfreedp.experiments.store.device import default_device
from hyfreedp.noise.random_states import random_states_kept

Tuning = Literal["full", "bitfit", "lora"]
LORA_RANK = 8  # with scale alpha / r = 1; on the projections of attention (Hu et al., 2022)
LORA_TARGETS = r".*attn\.(qkv|proj)"


@dataclass(frozen=True)
class Model:
    """One architecture.

    Attributes:
        build: ``build(features, classes)`` makes the model, with public weights or random ones (torch's global
            generator); features, the number per record, are used by the MLP only.
        tunings: which choices of trained parameters it allows.
        weights: our checkpoint that it starts from, see :mod:`hyfreedp.experiments.models.public_weights`, or None.
        physical_batch_size: samples computed at once, so that a step takes at most about 10 GB; None: the whole batch.
    """

    title: str
    build: Callable[[int, int], nn.Module]
    tunings: tuple[Tuning, ...] = ("full", "bitfit", "lora")
    weights: str | None = None
    physical_batch_size: int | None = None

    def checksum(self) -> str | None:
        """The checksum of our checkpoint that training starts from, for the keys of cells; None if there is none."""
        return None if self.weights is None else weights.checksum(self.weights)


class Pixels(nn.Module):
    """The first layer of every ViT: resizes stored images to (B, C, side, side) and scales pixels to [-1, 1].

    Takes uint8, shape (B, 3, H, W), or square grey images as flat vectors of floats in [0, 1], shape (B, H * H).
    Resizing is bilinear, with antialiasing if images become smaller.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, images: Tensor) -> Tensor:
        x = images.float() / 255 if images.dtype == torch.uint8 else images
        if x.dim() == 2:
            x = x.unflatten(1, (1, math.isqrt(x.shape[1]), -1))
        if len(x) and x.shape[-2:] != (self.side, self.side):
            x = F.interpolate(x, (self.side, self.side), mode="bilinear", antialias=True, align_corners=False)
        elif x.shape[-2:] != (self.side, self.side):
            x = x.new_empty((0, x.shape[1], self.side, self.side))
        return (x - 0.5) / 0.5


def mlp(hidden: tuple[int, ...], features: int, classes: int) -> nn.Sequential:
    """A multilayer perceptron with ReLUs and hidden layers of these widths, from (B, features) to (B, classes)."""
    widths = (features, *hidden, classes)
    modules: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        modules += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


# torch's layer norm: for timm's subclass of it Opacus has no rule.
_NORM = partial(nn.LayerNorm, eps=1e-6)


def vit(side: int, patch: int, channels: int, width: int, depth: int, heads: int, classes: int) -> nn.Module:
    """timm's vision transformer for square images, with random weights."""
    from timm.models.vision_transformer import VisionTransformer

    images: dict[str, Any] = {"img_size": side, "patch_size": patch, "in_chans": channels, "num_classes": classes}
    return VisionTransformer(embed_dim=width, depth=depth, num_heads=heads, norm_layer=_NORM, **images)


def _small_vit(
    side: int, patch: int, channels: int, width: int, depth: int, heads: int, _: int, classes: int
) -> nn.Module:
    return _with_pixels(vit(side, patch, channels, width, depth, heads, classes), side)


class Bfloat16(nn.Sequential):
    """Modules in sequence, with matrix products in bfloat16 and float32 outputs.

    On recent CPUs this is twice as fast, except for torch's fused attention, whose backward pass is far slower.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x).float()


def _half_precision_vit(*arguments: int) -> nn.Module:
    from timm.models.vision_transformer import Attention

    model = _small_vit(*arguments)
    for module in model.modules():
        if isinstance(module, Attention):
            module.fused_attn = False  # type: ignore[misc]  # final for TorchScript alone
    return Bfloat16(OrderedDict(model.named_children()))


def _public_vit(name: str, _: int, classes: int) -> nn.Module:
    import timm

    try:
        network = timm.create_model(f"{name}.augreg_in21k", pretrained=True, num_classes=classes, norm_layer=_NORM)
    except Exception as error:  # any error of the hub, the network or the file system
        raise RuntimeError(
            f"the public weights of {name} could not be loaded ({type(error).__name__}: {error}): connect to the "
            "internet once, so that timm keeps them, or choose a model that is trained from scratch"
        ) from error
    return _with_pixels(network, 224)


def _pretrained(recipe: str, base: str, features: int, classes: int) -> nn.Module:
    model = MODELS[base].build(features, classes)
    weights.load(recipe, model)
    return model


def _with_pixels(network: nn.Module, side: int) -> nn.Module:
    model = nn.Sequential(OrderedDict(pixels=Pixels(side), vit=network))
    for parameter in head(model).parameters():
        nn.init.zeros_(parameter)
    return model


MODELS = {
    "mlp": Model("MLP, 2 x 512", partial(mlp, (512, 512)), tunings=("full", "bitfit")),
    "vit8_d64_p4": Model("ViT, 8 x 8, width 64, depth 3", partial(_small_vit, 8, 4, 1, 64, 3, 4)),
    "vit8_glyphs": Model("ViT, pre-trained on glyphs", partial(_pretrained, "glyphs", "vit8_d64_p4"), weights="glyphs"),
    "vit32_d128": Model(
        "ViT, 32 x 32, width 128, depth 4", partial(_small_vit, 32, 4, 3, 128, 4, 4), physical_batch_size=250
    ),
    "vit32_d128_p8": Model(
        "ViT, 32 x 32, patches of 8, width 128, depth 6",
        partial(_half_precision_vit, 32, 8, 3, 128, 6, 4),
        physical_batch_size=500,
    ),
    "vit32_tiny_imagenet_d128": Model(
        "small ViT, pre-trained on Tiny ImageNet",
        partial(_pretrained, "tiny_imagenet_d128", "vit32_d128_p8"),
        weights="tiny_imagenet_d128",
        physical_batch_size=500,
    ),
    # As wide and deep as ViT-Tiny.
    "vit32_d192": Model(
        "ViT, 32 x 32, width 192, depth 12", partial(_small_vit, 32, 4, 3, 192, 12, 3), physical_batch_size=250
    ),
    "vit32_tiny_imagenet": Model(
        "ViT, pre-trained on Tiny ImageNet",
        partial(_pretrained, "tiny_imagenet", "vit32_d192"),
        weights="tiny_imagenet",
        physical_batch_size=250,
    ),
    "vit_small_patch16_224": Model("ViT-Small", partial(_public_vit, "vit_small_patch16_224"), physical_batch_size=50),
    "vit_base_patch16_224": Model("ViT-Base", partial(_public_vit, "vit_base_patch16_224"), physical_batch_size=25),
}


def head(module: nn.Module) -> nn.Linear:
    """The classifier: the last linear layer."""
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1]


def add_low_rank_updates(module: nn.Module, targets: str, **options: Any) -> None:
    """Add LoRA (Hu et al., 2022; zero at the start) to layers whose names match a regex; freeze all else, in place."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=targets, **options)
    inject_adapter_in_model(config, module)


def choose_trainable(module: nn.Module, tuning: Tuning) -> None:
    """Freeze, in place, all parameters that this tuning does not train.

    "full" trains all, "bitfit" biases and head (Ben Zaken et al., 2022), "lora" the head and new low-rank updates of
    the attention's projections.
    """
    if tuning == "full":
        return
    classifier = head(module)
    if tuning == "lora":
        add_low_rank_updates(module, LORA_TARGETS)
    else:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
    classifier.requires_grad_(True)


def make_model(name: str, tuning: Tuning, *, features: int, classes: int, seed: int) -> nn.Module:
    """A model of ``MODELS`` in train mode, with the parameters of ``tuning`` trainable.

    The global random state is restored. RuntimeError if public weights cannot be loaded.
    """
    with random_states_kept(default_device()):
        torch.manual_seed(seed)
        module = MODELS[name].build(features, classes)
        choose_trainable(module, tuning)
    return module.train()
