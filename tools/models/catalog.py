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
    "resmlp_12_224": (64, {"img_size": 64}),
    "mixer_s32_224": (64, {"img_size": 64}),
    "gmixer_24_224": (64, {"img_size": 64}),
    "gmlp_ti16_224": (64, {"img_size": 64}),
    "levit_128s": (64, {"img_size": 64}),
    "levit_conv_128s": (64, {"img_size": 64}),
    "maxvit_tiny_tf_224": (64, {"img_size": 64, "embed_dim": (32, 64), "depths": (1, 1)}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64, "embed_dim": (32, 64), "depths": (1, 1)}),
    "maxxvit_rmlp_nano_rw_256": (64, {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": (64, 64, 64, 64)}),
    "coatnet_pico_rw_224": (64, {"img_size": 64}),
    "coatnet_nano_rw_224": (64, {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": (32, 32, 64, 64)}),
    "coatnet_rmlp_nano_rw_224": (64, {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": (32, 32, 64, 64)}),
    "coatnext_nano_rw_224": (64, {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": (64, 64, 64, 64)}),
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
    "resnet18": (32, {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32), "stem_width": 16}),
    "resnet18d": (32, {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32), "stem_width": 16}),
    "resnetblur18": (32, {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32), "stem_width": 16}),
    "seresnet18": (32, {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32), "stem_width": 16}),
    "resnext26ts": (32, _NONE),
    "resnetv2_18": (32, _NONE),
    "resnetv2_50x1_bit": (64, {"channels": (128, 128, 128, 128), "stem_chs": 32}),
    "resnetv2_50": (32, {"layers": (1, 1, 1, 1), "channels": (32, 32, 64, 64), "stem_chs": 16}),
    "nfnet_l0": (32, {"depths": (1, 1, 1, 1)}),
    "dm_nfnet_f0": (32, {"depths": (1, 1, 1, 1)}),
    "nf_resnet26": (32, {"depths": (1, 1, 1, 1), "channels": (32, 32, 64, 64)}),
    "nf_regnet_b0": (32, _NONE),
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


# Sizes that make a model of transformers small, under the names that its configurations give them.
_SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_GPT2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
_T5 = {
    "vocab_size": WORDS,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 0, "forced_eos_token_id": 1,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_IMAGES = {"image_size": 32, "patch_size": 8, "num_labels": CLASSES}
_STAGES = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
_SPEECH = {
    "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "apply_spec_augment": False,
    "mask_time_prob": 0.0, "num_labels": CLASSES,
    "classifier_proj_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip

# model: (kind of input and loss, arguments of the configuration). The configuration's class is that of the model.
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("causal", _GPT2),
    "GPTNeoForCausalLM": (
        "causal",
        {**_SMALL, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    ),
    "GPTNeoXForCausalLM": ("causal", _SMALL),
    "GPTJForCausalLM": ("causal", {**_GPT2, "rotary_dim": 4}),
    "GPTBigCodeForCausalLM": ("causal", _GPT2),
    "LlamaForCausalLM": ("causal", _SMALL),
    "MistralForCausalLM": ("causal", _SMALL),
    "Qwen2ForCausalLM": ("causal", _SMALL),
    "Qwen3ForCausalLM": ("causal", _SMALL),
    "GemmaForCausalLM": ("causal", _SMALL),
    "Gemma2ForCausalLM": ("causal", {**_SMALL, "query_pre_attn_scalar": 8}),
    "Gemma3ForCausalLM": ("causal", {**_SMALL, "query_pre_attn_scalar": 8}),
    "PhiForCausalLM": ("causal", {**_SMALL, "num_key_value_heads": 2}),
    "Phi3ForCausalLM": ("causal", _SMALL),
    "OPTForCausalLM": ("causal", {**_SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    "BloomForCausalLM": ("causal", {**_SMALL, "n_layer": 2, "n_head": 2}),
    "FalconForCausalLM": ("causal", {name: size for name, size in _SMALL.items() if name != "head_dim"}),
    "StableLmForCausalLM": ("causal", {**_SMALL, "num_key_value_heads": 2}),
    "OlmoForCausalLM": ("causal", _SMALL),
    "Olmo2ForCausalLM": ("causal", _SMALL),
    "CohereForCausalLM": ("causal", _SMALL),
    "GraniteForCausalLM": ("causal", _SMALL),
    "SmolLM3ForCausalLM": ("causal", _SMALL),
    "Starcoder2ForCausalLM": ("causal", _SMALL),
    "MptForCausalLM": ("causal", {"vocab_size": WORDS, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32}),
    "MambaForCausalLM": ("causal", {**_SMALL, "state_size": 4, "time_step_rank": 2}),
    "MixtralForCausalLM": ("causal", {**_SMALL, **_EXPERTS}),
    "Qwen2MoeForCausalLM": ("causal", {**_SMALL, **_EXPERTS, "shared_expert_intermediate_size": 24}),
    "Qwen3MoeForCausalLM": ("causal", {**_SMALL, **_EXPERTS}),
    "BertForSequenceClassification": ("text", _SMALL),
    "RobertaForSequenceClassification": ("text", _SMALL),
    "XLMRobertaForSequenceClassification": ("text", _SMALL),
    "DistilBertForSequenceClassification": (
        "text",
        {**_SMALL, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2},
    ),
    "AlbertForSequenceClassification": ("text", {**_SMALL, "embedding_size": 8}),
    "ElectraForSequenceClassification": ("text", {**_SMALL, "embedding_size": 8}),
    "CamembertForSequenceClassification": ("text", _SMALL),
    "DebertaForSequenceClassification": (
        "text",
        {**_SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8},
    ),
    "DebertaV2ForSequenceClassification": (
        "text",
        {**_SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8},
    ),
    "DebertaV2ForSequenceClassification (v3)": (
        "text",
        {
            **_SMALL,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "position_buckets": 4,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
        },
    ),
    "ModernBertForSequenceClassification": ("text", _SMALL),
    "MPNetForSequenceClassification": ("text", {**_SMALL, "pad_token_id": 1, "max_position_embeddings": 64}),
    "LongformerForSequenceClassification": ("text", {**_SMALL, "attention_window": 4}),
    "XLNetForSequenceClassification": (
        "text",
        {"vocab_size": WORDS, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
    ),
    "FunnelForSequenceClassification": (
        "text",
        {"vocab_size": WORDS, "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24},
    ),
    "MobileBertForSequenceClassification": (
        "text",
        {**_SMALL, "embedding_size": 8, "intra_bottleneck_size": 8, "true_hidden_size": 8},
    ),
    "SqueezeBertForSequenceClassification": (
        "text",
        {
            **_SMALL,
            "embedding_size": 16,
            "q_groups": 2,
            "k_groups": 2,
            "v_groups": 2,
            "post_attention_groups": 1,
            "intermediate_groups": 2,
            "output_groups": 2,
        },
    ),
    "FNetForSequenceClassification": ("text", _SMALL),
    "T5ForConditionalGeneration": ("pairs", _T5),
    "T5ForConditionalGeneration (v1.1)": (
        "pairs",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "MT5ForConditionalGeneration": ("pairs", _T5),
    "BartForConditionalGeneration": ("pairs", _BART),
    "MBartForConditionalGeneration": ("pairs", _BART),
    "PegasusForConditionalGeneration": ("pairs", _BART),
    "MarianMTModel": ("pairs", _BART),
    "WhisperForConditionalGeneration": (
        "speech pairs",
        {**_BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
    ),
    "Wav2Vec2ForSequenceClassification": ("speech", _SPEECH),
    "Wav2Vec2ForSequenceClassification (layer norm)": (
        "speech",
        {**_SPEECH, "feat_extract_norm": "layer", "do_stable_layer_norm": True},
    ),
    "HubertForSequenceClassification": ("speech", _SPEECH),
    "WavLMForSequenceClassification": ("speech", {**_SPEECH, "num_buckets": 8, "max_bucket_distance": 16}),
    "ViTForImageClassification": ("image", {**_SMALL, **_IMAGES}),
    "DeiTForImageClassification": ("image", {**_SMALL, **_IMAGES}),
    "BeitForImageClassification": (
        "image",
        {**_SMALL, **_IMAGES, "use_relative_position_bias": True, "layer_scale_init_value": 0.1, "out_indices": [1]},
    ),
    "Dinov2ForImageClassification": ("image", {**_SMALL, **_IMAGES}),
    "ConvNextForImageClassification": (
        "image",
        {"num_labels": CLASSES, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    ),
    "SwinForImageClassification": ("image", {**_STAGES, "num_labels": CLASSES}),
    "Swinv2ForImageClassification": ("image", {**_STAGES, "num_labels": CLASSES}),
    "SegformerForImageClassification": (
        "image",
        {
            "num_labels": CLASSES,
            "hidden_sizes": [8, 8],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "num_attention_heads": [1, 2],
            "sr_ratios": [2, 1],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 8,
        },
    ),
    "CLIPForImageClassification": ("image", {"vision_config": {**_SMALL, **_IMAGES}, "num_labels": CLASSES}),
    "CLIPTextModelWithProjection": ("features", {**_SMALL, "projection_dim": 8}),
    "SiglipForImageClassification": ("image", {"vision_config": {**_SMALL, **_IMAGES}, "num_labels": CLASSES}),
}

# name: (model of transformers, the method's class in peft, its arguments)
PEFT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "LoRA, LLaMA": ("LlamaForCausalLM", "LoraConfig", {"r": 2, "target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "LoRA, GPT-2": ("GPT2LMHeadModel", "LoraConfig", {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "LoRA on embeddings, LLaMA": (
        "LlamaForCausalLM",
        "LoraConfig",
        {"r": 2, "target_modules": ["embed_tokens", "q_proj"]},
    ),
    "LoRA with a trained head, BERT": (
        "BertForSequenceClassification",
        "LoraConfig",
        {"r": 2, "target_modules": ["query"], "modules_to_save": ["classifier"]},
    ),
    "LoRA, ViT": (
        "ViTForImageClassification",
        "LoraConfig",
        {"r": 2, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]},
    ),
    "LoRA, Swin": (
        "SwinForImageClassification",
        "LoraConfig",
        {"r": 2, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]},
    ),
    "LoRA on convolutions, ConvNext": (
        "ConvNextForImageClassification",
        "LoraConfig",
        {"r": 2, "target_modules": r".*(downsampling_layer.1|pwconv1)"},
    ),
    "LoRA, T5": ("T5ForConditionalGeneration", "LoraConfig", {"r": 2, "target_modules": ["q", "v"]}),
    "rsLoRA, LLaMA": ("LlamaForCausalLM", "LoraConfig", {"r": 2, "use_rslora": True, "target_modules": ["q_proj"]}),
    "DoRA, LLaMA": (
        "LlamaForCausalLM",
        "LoraConfig",
        {"r": 2, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    ),
    "DoRA, ViT": ("ViTForImageClassification", "LoraConfig", {"r": 2, "use_dora": True, "target_modules": ["q_proj"]}),
    "IA3, LLaMA": (
        "LlamaForCausalLM",
        "IA3Config",
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "IA3, T5": (
        "T5ForConditionalGeneration",
        "IA3Config",
        {"target_modules": ["k", "v", "wo"], "feedforward_modules": ["wo"]},
    ),
    "VeRA, LLaMA": ("LlamaForCausalLM", "VeraConfig", {"r": 2, "target_modules": ["q_proj"], "d_initial": 0.1}),
    "AdaLoRA, LLaMA": (
        "LlamaForCausalLM",
        "AdaLoraConfig",
        {"init_r": 2, "target_r": 1, "total_step": 10, "tinit": 1, "tfinal": 1, "target_modules": ["q_proj"]},
    ),
    "LoHa, LLaMA": ("LlamaForCausalLM", "LoHaConfig", {"r": 2, "target_modules": ["q_proj"]}),
    "LoKr, LLaMA": ("LlamaForCausalLM", "LoKrConfig", {"r": 2, "target_modules": ["q_proj"]}),
    "OFT, LLaMA": ("LlamaForCausalLM", "OFTConfig", {"oft_block_size": 4, "target_modules": ["q_proj"]}),
    "BOFT, LLaMA": ("LlamaForCausalLM", "BOFTConfig", {"boft_block_size": 4, "target_modules": ["q_proj"]}),
    "FourierFT, LLaMA": ("LlamaForCausalLM", "FourierFTConfig", {"n_frequency": 20, "target_modules": ["q_proj"]}),
    "LN tuning, LLaMA": ("LlamaForCausalLM", "LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    "prompt tuning, GPT-2": ("GPT2LMHeadModel", "PromptTuningConfig", {"num_virtual_tokens": 3}),
    "prefix tuning, GPT-2": ("GPT2LMHeadModel", "PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "P-tuning, GPT-2": ("GPT2LMHeadModel", "PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
}


def _transformers(name: str, kind: str, arguments: dict[str, Any]) -> Case:
    def build() -> Any:
        model = _model(name, arguments)
        return (_prepared(model), *_TASKS[kind])

    return Case("transformers", name, build)


def _peft(name: str, base: str, method: str, arguments: dict[str, Any]) -> Case:
    def build() -> Any:
        import peft

        kind, sizes = TRANSFORMERS[base]
        model = _model(base, sizes)
        tasks = {"causal": "CAUSAL_LM", "pairs": "SEQ_2_SEQ_LM"}
        model = peft.get_peft_model(model, getattr(peft, method)(**arguments, task_type=tasks.get(kind)))
        return (_prepared(model), *_TASKS[kind])

    return Case("peft", name, build)


def _model(name: str, arguments: dict[str, Any]) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name.split()[0])
    configuration = kind.config_class(**arguments)
    configuration._experts_implementation = "eager"  # the others have no double precision
    return kind(configuration)


def _texts(samples: int) -> tuple[Tensor, ...]:
    ids = torch.randint(4, WORDS, (samples, TOKENS))
    mask = torch.ones_like(ids)
    mask[0, TOKENS - 2 :] = 0
    return ids.where(mask > 0, 2), mask, torch.randint(2, (samples,))


def _text_loss(model: nn.Module, ids: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=ids, attention_mask=mask).logits, y, reduction="none")


def _causal_loss(model: nn.Module, ids: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -ids.shape[1] :]
    losses = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
    return (losses * mask[:, 1:]).sum(1)


def _pair_loss(model: nn.Module, ids: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :5], use_cache=False).logits
    return F.cross_entropy(logits[:, -4:].mT, ids[:, 1:5], reduction="none").sum(1)


def _images(samples: int) -> tuple[Tensor, ...]:
    return torch.randn(samples, 3, 32, 32, dtype=torch.float64), torch.randint(CLASSES, (samples,))


def _image_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(pixel_values=x).logits, y, reduction="none")


_TASKS: dict[str, tuple[Callable[[int], tuple[Tensor, ...]], Callable[..., Tensor]]] = {
    "causal": (_texts, _causal_loss),
    "text": (_texts, _text_loss),
    "pairs": (_texts, _pair_loss),
    "image": (_images, _image_loss),
    "features": (_texts, lambda model, ids, mask, y: model(input_ids=ids, attention_mask=mask)[0].square().sum(1)),
    "speech": (
        lambda samples: (torch.randn(samples, 320, dtype=torch.float64), torch.randint(CLASSES, (samples,))),
        lambda model, x, y: F.cross_entropy(model(input_values=x).logits, y, reduction="none"),
    ),
    "speech pairs": (
        lambda samples: (torch.randn(samples, 8, 32, dtype=torch.float64), torch.randint(4, WORDS, (samples, 5))),
        lambda model, x, ids: F.cross_entropy(
            model(input_features=x, decoder_input_ids=ids[:, :-1], use_cache=False).logits.mT,
            ids[:, 1:],
            reduction="none",
        ).sum(1),
    ),
}


def _prepared(model: nn.Module) -> nn.Module:
    """In train mode, of double precision and without dropout; parameters that begin at zero are moved."""
    for layer in model.modules():
        for name in (
            "p",
            "drop_prob",
            "dropout",
            "attention_dropout",
            "activation_dropout",
            "layerdrop",
            "drop_path",
            "attn_dropout",
        ):
            if isinstance(getattr(layer, name, None), float):
                setattr(layer, name, 0.0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model.double().train()


def cases() -> Iterator[Case]:
    for name, (size, arguments) in TIMM.items():
        yield _timm(name, size, arguments)
    for name, (kind, arguments) in TRANSFORMERS.items():
        yield _transformers(name, kind, arguments)
    for name, (base, method, arguments) in PEFT.items():
        yield _peft(name, base, method, arguments)
