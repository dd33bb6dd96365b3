"""The models of the table: current vision and language models in small, with random weights, a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, SAMPLES, TOKENS, WORDS = 5, 3, 8, 48


@dataclass(frozen=True)
class Case:
    """A model in small.

    Attributes:
        library, name: whose it is, and what it is called there.
        build: a model in train mode, of double precision; and a function from a number of samples to a batch of so many
            and its loss, ``(batch, loss(model, *batch))``, of shape (B,).
        head: what the names of the last layer's parameters begin with.
    """

    library: str
    name: str
    build: Callable[[], tuple[nn.Module, Callable[[int], tuple[Tensor, ...]], Callable[..., Tensor]]]


_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
_EVA = _VIT
_SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 2)}
_NEXT = {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 16)}
_NONE: dict[str, Any] = {}

# name: (size of the images, arguments that make it small)
TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    **{
        name: (32, _VIT)
        for name in (
            "vit_tiny_patch16_224 vit_small_patch16_224 vit_base_patch16_224 vit_base_patch16_clip_224 "
            "vit_base_patch16_rpn_224 vit_base_patch16_xp_224 vit_small_patch16_36x1_224 vit_small_patch16_18x2_224 "
            "vit_base_patch16_224_miil vit_base_patch14_reg4_dinov2 vit_base_patch16_siglip_224"
        ).split()
    },
    "vit_relpos_small_patch16_224": (32, _VIT),
    "vit_srelpos_small_patch16_224": (32, _VIT),
    "vit_relpos_base_patch16_clsgap_224": (32, _VIT),
    "vit_tiny_r_s16_p8_224": (64, {"img_size": 64, "embed_dim": 24, "depth": 2, "num_heads": 2}),
    **{
        name: (32, _VIT)
        for name in "deit_tiny_patch16_224 deit_tiny_distilled_patch16_224 deit3_small_patch16_224".split()
    },
    **{name: (32, _VIT) for name in "beit_base_patch16_224 beitv2_base_patch16_224".split()},
    **{
        name: (32, _EVA)
        for name in (
            "eva02_tiny_patch14_224 eva02_base_patch16_clip_224 eva_giant_patch14_224 vit_small_patch16_dinov3 "
            "vit_base_patch16_dinov3 vit_pe_core_tiny_patch16_384 vit_medium_patch16_rope_reg1_gap_256"
        ).split()
    },
    **{name: (32, _SWIN) for name in "swin_tiny_patch4_window7_224 swin_s3_tiny_224".split()},
    **{name: (32, _SWIN) for name in "swinv2_tiny_window8_256 swinv2_cr_tiny_224".split()},
    **{
        name: (32, _NEXT)
        for name in "convnext_atto convnext_tiny convnext_nano_ols convnextv2_atto convnextv2_tiny".split()
    },
    "cait_xxs24_224": (32, _VIT),
    "cait_s24_224": (32, _VIT),
    "edgenext_xx_small": (64, {"dims": (8, 16, 24, 32), "depths": (1, 1, 2, 1), "heads": (2, 2, 2, 2)}),
    "edgenext_small": (64, {"dims": (8, 16, 24, 32), "depths": (1, 1, 2, 1), "heads": (2, 2, 2, 2)}),
    "resmlp_12_224": (64, {"img_size": 64, "num_blocks": 2, "embed_dim": 24}),
    "resmlp_24_224": (64, {"img_size": 64, "num_blocks": 2, "embed_dim": 24}),
    "mixer_s32_224": (64, {"img_size": 64, "num_blocks": 2, "embed_dim": 24}),
    "mixer_b16_224": (64, {"img_size": 64, "num_blocks": 2, "embed_dim": 24}),
    "gmixer_24_224": (64, {"img_size": 64, "num_blocks": 2, "embed_dim": 24}),
    "gmlp_ti16_224": (64, {"img_size": 64, "num_blocks": 2, "embed_dim": 24}),
    "levit_128s": (64, {"img_size": 64}),
    "levit_conv_128s": (64, {"img_size": 64}),
    "maxvit_tiny_tf_224": (64, {"img_size": 64, "embed_dim": (8, 16), "depths": (1, 1)}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "maxxvit_rmlp_nano_rw_256": (64, {"img_size": 64}),
    "maxxvitv2_nano_rw_256": (64, {"img_size": 64}),
    "coatnet_pico_rw_224": (64, {"img_size": 64}),
    "coatnet_nano_rw_224": (64, {"img_size": 64}),
    "coatnet_rmlp_nano_rw_224": (64, {"img_size": 64}),
    "coatnext_nano_rw_224": (64, {"img_size": 64}),
    "coat_tiny": (32, {"img_size": 32, "embed_dims": (8, 16, 16, 16), "serial_depths": (1, 1, 1, 1)}),
    "coat_lite_tiny": (64, {"img_size": 64, "embed_dims": (8, 16, 16, 16), "serial_depths": (1, 1, 1, 1)}),
    "xcit_nano_12_p16_224": (32, {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2}),
    "xcit_tiny_12_p8_224": (32, {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2}),
    "davit_tiny": (64, {"depths": (1, 1), "embed_dims": (8, 16), "num_heads": (2, 2)}),
    "davit_small": (64, {"depths": (1, 1), "embed_dims": (8, 16), "num_heads": (2, 2)}),
    "tnt_s_patch16_224": (
        32,
        {"img_size": 32, "embed_dim": 24, "inner_dim": 8, "depth": 2, "num_heads_inner": 2, "num_heads_outer": 2},
    ),
    "tnt_b_patch16_224": (
        32,
        {"img_size": 32, "embed_dim": 24, "inner_dim": 8, "depth": 2, "num_heads_inner": 2, "num_heads_outer": 2},
    ),
    "convit_tiny": (
        32,
        {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "local_up_to_layer": 1},
    ),
    "convit_small": (
        32,
        {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "local_up_to_layer": 1},
    ),
    "sequencer2d_s": (
        32,
        {
            "layers": (1, 1),
            "img_size": 32,
            "patch_sizes": (4, 2),
            "embed_dims": (12, 16),
            "hidden_sizes": (4, 4),
            "mlp_ratios": (2.0, 2.0),
        },
    ),
    "resnet10t": (32, _NONE),
    "resnet18": (32, _NONE),
    "resnet26": (32, _NONE),
    "resnet18d": (32, _NONE),
    "resnetblur18": (32, _NONE),
    "seresnet18": (32, _NONE),
    "resnext26ts": (32, _NONE),
    "resnetv2_18": (32, _NONE),
    "resnetv2_50x1_bit": (32, {"channels": (32, 32, 64, 64), "stem_chs": 16}),
    "resnetv2_50": (32, {"layers": (1, 1, 1, 1), "channels": (32, 32, 64, 64), "stem_chs": 16}),
    "nfnet_l0": (32, _NONE),
    "dm_nfnet_f0": (32, _NONE),
    "nf_resnet26": (32, _NONE),
    "nf_regnet_b0": (32, _NONE),
    "nf_ecaresnet26": (32, _NONE),
    "eca_nfnet_l0": (32, _NONE),
    "regnetx_002": (32, _NONE),
    "regnety_002": (32, _NONE),
    "regnetz_005": (32, _NONE),
    "regnetz_b16": (32, _NONE),
    "efficientnet_b0": (32, _NONE),
    "efficientnet_lite0": (32, _NONE),
    "tf_efficientnetv2_b0": (32, _NONE),
    "efficientvit_b0": (32, _NONE),
    "mobilenetv3_small_050": (32, _NONE),
    "mobilenetv3_large_100": (32, _NONE),
    "mobilenetv2_035": (32, _NONE),
    "mobilenetv4_conv_small": (32, _NONE),
    "densenet121": (32, {"growth_rate": 8, "block_config": (2, 2, 2, 2)}),
    "densenetblur121d": (32, {"growth_rate": 8, "block_config": (2, 2, 2, 2)}),
    "mobilevit_xxs": (64, _NONE),
    "mobilevitv2_050": (64, _NONE),
    "poolformer_s12": (32, _NONE),
    "poolformerv2_s12": (32, _NONE),
    "caformer_s18": (32, _NONE),
    "convformer_s18": (32, _NONE),
    "pvt_v2_b0": (32, {"depths": (1, 1, 1, 1)}),
    "twins_pcpvt_small": (64, {"img_size": 64, "depths": (1, 1, 1, 1)}),
    "twins_svt_small": (64, {"img_size": 64, "depths": (1, 1, 1, 1)}),
    "visformer_tiny": (32, {"img_size": 32}),
    "pit_ti_224": (64, {"img_size": 64}),
    "hiera_tiny_224": (64, {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 1, 1, 1), "num_heads": 1}),
    "focalnet_tiny_srf": (32, _NONE),
    "gcvit_xxtiny": (64, {"img_size": 64}),
    "volo_d1_224": (32, {"img_size": 32}),
    "crossvit_tiny_240": (240, _NONE),
    "mvitv2_tiny": (64, {"img_size": 64}),
    "nest_tiny": (64, {"img_size": 64}),
    "fastvit_t8": (64, _NONE),
    "repvit_m0_9": (32, _NONE),
    "inception_next_atto": (32, _NONE),
    "naflexvit_base_patch16_gap": (32, {"embed_dim": 24, "depth": 2, "num_heads": 2}),
}


def _timm(name: str, size: int, arguments: dict[str, Any]) -> Case:
    def build() -> Any:
        import timm

        torch.manual_seed(0)
        model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **arguments)

        def batch(samples: int) -> tuple[Tensor, ...]:
            return torch.randn(samples, 3, size, size, dtype=torch.float64), torch.randint(CLASSES, (samples,))

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            output = model(x)
            logits = sum(output) if isinstance(output, tuple) else output
            return F.cross_entropy(logits, y, reduction="none")

        return _prepared(model), batch, loss

    return Case("timm", name, build)


def _prepared(model: nn.Module) -> nn.Module:
    """In train mode, of double precision and without dropout; parameters that begin at zero are moved."""
    for layer in model.modules():
        for name in ("p", "drop_prob", "dropout", "attention_dropout", "activation_dropout", "layerdrop", "drop_path"):
            if isinstance(getattr(layer, name, None), float):
                setattr(layer, name, 0.0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model.double().train()


def cases() -> Iterator[Case]:
    for name, (size, arguments) in TIMM.items():
        yield _timm(name, size, arguments)
