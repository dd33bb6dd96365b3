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
        build: a model in train mode, of double precision; a function from a number of samples to a batch of so many;
            and its loss, ``loss(model, *batch)``, a mean over the batch, as it is written without privacy.
    """

    library: str
    name: str
    build: Callable[[], tuple[nn.Module, Callable[[int], tuple[Tensor, ...]], Callable[..., Tensor]]]


# -- timm: size of the images, arguments that make a model small, and the models that they fit -------------------------

_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
_SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 2)}
_NEXT = {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 16)}
_EDGE = {"dims": (8, 16, 24, 32), "depths": (1, 1, 2, 1), "heads": (2, 2, 2, 2)}
_SMALL_IMAGE, _IMAGE = {"img_size": 32}, {"img_size": 64}
_ONES = {"depths": (1, 1, 1, 1)}
_RESNET = {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32), "stem_width": 16}
_COAT = {"embed_dims": (8, 16, 16, 16), "serial_depths": (1, 1, 1, 1)}
_TNT = {"embed_dim": 24, "inner_dim": 8, "depth": 2, "num_heads_inner": 2, "num_heads_outer": 2}
_HYBRID, _WIDE = {"embed_dim": (32, 64), "depths": (1, 1)}, {"embed_dim": (64, 64, 64, 64)} | _ONES
_TWO_STAGES = {"depths": (1, 1), "embed_dims": (8, 16), "num_heads": (2, 2)}
_SEQUENCER = {
    "layers": (1, 1), "patch_sizes": (4, 2), "embed_dims": (12, 16), "hidden_sizes": (4, 4), "mlp_ratios": (2.0, 2.0)
}  # fmt: skip

TIMM: list[tuple[int, dict[str, Any], str]] = [
    (
        32, _VIT,
        "vit_tiny_patch16_224 vit_small_patch16_224 vit_base_patch16_224 vit_base_patch16_clip_224 "
        "vit_base_patch16_rpn_224 vit_base_patch16_xp_224 vit_small_patch16_36x1_224 vit_small_patch16_18x2_224 "
        "vit_base_patch16_224_miil vit_base_patch14_reg4_dinov2 vit_base_patch16_siglip_224 "
        "vit_relpos_small_patch16_224 vit_srelpos_small_patch16_224 vit_relpos_base_patch16_clsgap_224 "
        "deit_tiny_patch16_224 deit_tiny_distilled_patch16_224 deit3_small_patch16_224 beit_base_patch16_224 "
        "beitv2_base_patch16_224 eva02_tiny_patch14_224 eva02_base_patch16_clip_224 eva_giant_patch14_224 "
        "vit_small_patch16_dinov3 vit_base_patch16_dinov3 vit_pe_core_tiny_patch16_384 "
        "vit_medium_patch16_rope_reg1_gap_256 cait_xxs24_224 cait_s24_224",
    ),
    (64, {"img_size": 64, "embed_dim": 24, "depth": 2, "num_heads": 2}, "vit_tiny_r_s16_p8_224"),
    (32, {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2}, "xcit_nano_12_p16_224 xcit_tiny_12_p8_224"),
    (32, {"embed_dim": 24, "depth": 2, "num_heads": 2}, "naflexvit_base_patch16_gap"),
    (32, _SWIN, "swin_tiny_patch4_window7_224 swin_s3_tiny_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224"),
    (32, _NEXT, "convnext_atto convnext_tiny convnext_nano_ols convnextv2_atto convnextv2_tiny"),
    (64, _EDGE, "edgenext_xx_small edgenext_small"),
    (
        64, _IMAGE,
        "resmlp_12_224 mixer_s32_224 gmixer_24_224 gmlp_ti16_224 levit_128s levit_conv_128s coatnet_pico_rw_224 "
        "pit_ti_224 gcvit_xxtiny",
    ),
    (64, _IMAGE | _HYBRID, "maxvit_tiny_tf_224 maxvit_rmlp_pico_rw_256"),
    (64, _IMAGE | _WIDE, "maxxvit_rmlp_nano_rw_256 coatnext_nano_rw_224"),
    (64, _IMAGE | _ONES | {"embed_dim": (32, 32, 64, 64)}, "coatnet_nano_rw_224 coatnet_rmlp_nano_rw_224"),
    (32, _SMALL_IMAGE | _COAT, "coat_tiny"),
    (64, _IMAGE | _COAT, "coat_lite_tiny"),
    (64, _TWO_STAGES, "davit_tiny davit_small"),
    (32, _SMALL_IMAGE | _TNT, "tnt_s_patch16_224 tnt_b_patch16_224"),
    (32, _VIT | {"local_up_to_layer": 1}, "convit_tiny convit_small"),
    (32, _SMALL_IMAGE | _SEQUENCER, "sequencer2d_s"),
    (32, _RESNET, "resnet18 resnet18d resnetblur18 seresnet18"),
    (64, {"channels": (128, 128, 128, 128), "stem_chs": 32}, "resnetv2_50x1_bit"),
    (32, {"layers": (1, 1, 1, 1), "channels": (32, 32, 64, 64), "stem_chs": 16}, "resnetv2_50"),
    (32, _ONES, "nfnet_l0 dm_nfnet_f0 pvt_v2_b0"),
    (32, _ONES | {"channels": (32, 32, 64, 64)}, "nf_resnet26"),
    (32, {"growth_rate": 8, "block_config": (2, 2, 2, 2)}, "densenet121 densenetblur121d"),
    (64, _IMAGE | _ONES, "twins_pcpvt_small twins_svt_small"),
    (32, _SMALL_IMAGE, "visformer_tiny volo_d1_224"),
    (64, {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 1, 1, 1), "num_heads": 1}, "hiera_tiny_224"),
    (64, {}, "mobilevit_xxs mobilevitv2_050 fastvit_t8"),
    (
        32, {},
        "resnet10t resnext26ts resnetv2_18 nf_regnet_b0 regnetx_002 regnety_002 regnetz_005 regnetz_b16 "
        "efficientnet_b0 efficientnet_lite0 tf_efficientnetv2_b0 efficientvit_b0 mobilenetv3_small_050 "
        "mobilenetv3_large_100 mobilenetv2_035 mobilenetv4_conv_small poolformer_s12 poolformerv2_s12 "
        "caformer_s18 convformer_s18 focalnet_tiny_srf repvit_m0_9 inception_next_atto",
    ),
]  # fmt: skip


def _timm(name: str, size: int, arguments: dict[str, Any]) -> Any:
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **arguments)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        logits = sum(output) if isinstance(output, tuple) else output
        return F.cross_entropy(logits, y)

    return _prepared(model), lambda samples: _images(samples, size), loss


# -- transformers: kind of input and loss, arguments of the configuration, and the models that they fit ----------------

_SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
_GPT2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
_T5 = {
    "vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
_BART = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 0, "forced_eos_token_id": 1,
}  # fmt: skip
_MOE = _SMALL | {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEBERTA = _SMALL | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}
_DEBERTA_3 = _SMALL | {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "position_buckets": 4,
    "norm_rel_ebd": "layer_norm", "position_biased_input": False,
}  # fmt: skip
_GROUPS = {f"{part}_groups": 2 for part in ("q", "k", "v", "intermediate", "output")} | {"post_attention_groups": 1}
_IMAGES = {"image_size": 32, "patch_size": 8, "num_labels": CLASSES}
_STAGES = {
    "image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4,
    "num_labels": CLASSES,
}  # fmt: skip
_SEGFORMER = {
    "num_labels": CLASSES, "hidden_sizes": [8, 8], "depths": [1, 1], "num_encoder_blocks": 2,
    "num_attention_heads": [1, 2], "sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [2, 2],
    "decoder_hidden_size": 8,
}  # fmt: skip
_SPEECH = {
    "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "apply_spec_augment": False,
    "mask_time_prob": 0.0, "num_labels": CLASSES, "classifier_proj_size": 8, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
_NEO = _SMALL | {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}
_XLNET = {"vocab_size": WORDS, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}
_FUNNEL = {"vocab_size": WORDS, "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24}
_WHISPER = _BART | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
_BEIT = _SMALL | _IMAGES | {
    "use_relative_position_bias": True, "layer_scale_init_value": 0.1, "out_indices": [1]
}  # fmt: skip

TRANSFORMERS: list[tuple[str, dict[str, Any], str]] = [
    ("causal", _GPT2, "GPT2LMHeadModel GPTBigCodeForCausalLM"),
    ("causal", _GPT2 | {"rotary_dim": 4}, "GPTJForCausalLM"),
    ("causal", _NEO, "GPTNeoForCausalLM"),
    (
        "causal", _SMALL,
        "GPTNeoXForCausalLM LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM GemmaForCausalLM "
        "Phi3ForCausalLM OlmoForCausalLM Olmo2ForCausalLM CohereForCausalLM GraniteForCausalLM SmolLM3ForCausalLM "
        "Starcoder2ForCausalLM",
    ),
    ("causal", _SMALL | {"query_pre_attn_scalar": 8}, "Gemma2ForCausalLM Gemma3ForCausalLM"),
    ("causal", _SMALL | {"num_key_value_heads": 2}, "PhiForCausalLM StableLmForCausalLM"),
    ("causal", _SMALL | {"ffn_dim": 24, "word_embed_proj_dim": 16}, "OPTForCausalLM"),
    ("causal", _SMALL | {"n_layer": 2, "n_head": 2}, "BloomForCausalLM"),
    ("causal", {name: size for name, size in _SMALL.items() if name != "head_dim"}, "FalconForCausalLM"),
    ("causal", {"vocab_size": WORDS, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32}, "MptForCausalLM"),
    ("causal", _SMALL | {"state_size": 4, "time_step_rank": 2}, "MambaForCausalLM"),
    ("causal", _MOE, "MixtralForCausalLM Qwen3MoeForCausalLM"),
    ("causal", _MOE | {"shared_expert_intermediate_size": 24}, "Qwen2MoeForCausalLM"),
    (
        "text", _SMALL,
        "BertForSequenceClassification RobertaForSequenceClassification XLMRobertaForSequenceClassification "
        "CamembertForSequenceClassification ModernBertForSequenceClassification FNetForSequenceClassification",
    ),
    (
        "text", _SMALL | {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2},
        "DistilBertForSequenceClassification",
    ),
    ("text", _SMALL | {"embedding_size": 8}, "AlbertForSequenceClassification ElectraForSequenceClassification"),
    ("text", _DEBERTA, "DebertaForSequenceClassification DebertaV2ForSequenceClassification"),
    ("text", _DEBERTA_3, "DebertaV2ForSequenceClassification_(v3)"),
    ("text", _SMALL | {"pad_token_id": 1, "max_position_embeddings": 64}, "MPNetForSequenceClassification"),
    ("text", _SMALL | {"attention_window": 4}, "LongformerForSequenceClassification"),
    ("text", _XLNET, "XLNetForSequenceClassification"),
    ("text", _FUNNEL, "FunnelForSequenceClassification"),
    (
        "text", _SMALL | {"embedding_size": 8, "intra_bottleneck_size": 8, "true_hidden_size": 8},
        "MobileBertForSequenceClassification",
    ),
    ("text", _SMALL | {"embedding_size": 16} | _GROUPS, "SqueezeBertForSequenceClassification"),
    ("pairs", _T5, "T5ForConditionalGeneration MT5ForConditionalGeneration"),
    (
        "pairs", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "T5ForConditionalGeneration_(v1.1)",
    ),
    (
        "pairs", _BART,
        "BartForConditionalGeneration MBartForConditionalGeneration PegasusForConditionalGeneration MarianMTModel",
    ),
    ("speech pairs", _WHISPER, "WhisperForConditionalGeneration"),
    ("speech", _SPEECH, "Wav2Vec2ForSequenceClassification HubertForSequenceClassification"),
    (
        "speech", _SPEECH | {"feat_extract_norm": "layer", "do_stable_layer_norm": True},
        "Wav2Vec2ForSequenceClassification_(layer_norm)",
    ),
    ("speech", _SPEECH | {"num_buckets": 8, "max_bucket_distance": 16}, "WavLMForSequenceClassification"),
    ("image", _SMALL | _IMAGES, "ViTForImageClassification DeiTForImageClassification Dinov2ForImageClassification"),
    ("image", _BEIT, "BeitForImageClassification"),
    (
        "image", {"num_labels": CLASSES, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
        "ConvNextForImageClassification",
    ),
    ("image", _STAGES, "SwinForImageClassification Swinv2ForImageClassification"),
    ("image", _SEGFORMER, "SegformerForImageClassification"),
    (
        "image", {"vision_config": _SMALL | _IMAGES, "num_labels": CLASSES},
        "CLIPForImageClassification SiglipForImageClassification",
    ),
    ("features", _SMALL | {"projection_dim": 8}, "CLIPTextModelWithProjection"),
]  # fmt: skip
_CONFIGURATIONS = {name: (kind, arguments) for kind, arguments, names in TRANSFORMERS for name in names.split()}

# -- peft: name, model of transformers, the method's class in peft, its arguments --------------------------------------

_LLAMA, _VIT_MODEL = "LlamaForCausalLM", "ViTForImageClassification"
_QV, _HEAD, _Q = ["q_proj", "v_proj"], {"modules_to_save": ["classifier"]}, {"target_modules": ["q_proj"]}
_ADA = {"init_r": 2, "target_r": 1, "total_step": 10, "tinit": 1, "tfinal": 1}
_IA3 = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}

PEFT: list[tuple[str, str, str, dict[str, Any]]] = [
    ("LoRA, LLaMA", _LLAMA, "Lora", {"r": 2, "target_modules": [*_QV, "down_proj"]}),
    ("LoRA, GPT-2", "GPT2LMHeadModel", "Lora", {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ("LoRA on embeddings, LLaMA", _LLAMA, "Lora", {"r": 2, "target_modules": ["embed_tokens", "q_proj"]}),
    (
        "LoRA with a trained head, BERT", "BertForSequenceClassification", "Lora",
        {"r": 2, "target_modules": ["query"]} | _HEAD,
    ),
    ("LoRA, ViT", _VIT_MODEL, "Lora", {"r": 2, "target_modules": _QV} | _HEAD),
    ("LoRA, Swin", "SwinForImageClassification", "Lora", {"r": 2, "target_modules": _QV} | _HEAD),
    (
        "LoRA on convolutions, ConvNext", "ConvNextForImageClassification", "Lora",
        {"r": 2, "target_modules": r".*(downsampling_layer.1|pwconv1)"},
    ),
    ("LoRA, T5", "T5ForConditionalGeneration", "Lora", {"r": 2, "target_modules": ["q", "v"]}),
    ("rsLoRA, LLaMA", _LLAMA, "Lora", {"r": 2, "use_rslora": True} | _Q),
    ("DoRA, LLaMA", _LLAMA, "Lora", {"r": 2, "use_dora": True, "target_modules": ["q_proj", "down_proj"]}),
    ("DoRA, ViT", _VIT_MODEL, "Lora", {"r": 2, "use_dora": True} | _Q),
    ("IA3, LLaMA", _LLAMA, "IA3", _IA3),
    (
        "IA3, T5", "T5ForConditionalGeneration", "IA3",
        {"target_modules": ["k", "v", "wo"], "feedforward_modules": ["wo"]},
    ),
    ("VeRA, LLaMA", _LLAMA, "Vera", {"r": 2, "d_initial": 0.1} | _Q),
    ("AdaLoRA, LLaMA", _LLAMA, "AdaLora", _ADA | _Q),
    ("LoHa, LLaMA", _LLAMA, "LoHa", {"r": 2} | _Q),
    ("LoKr, LLaMA", _LLAMA, "LoKr", {"r": 2} | _Q),
    ("OFT, LLaMA", _LLAMA, "OFT", {"oft_block_size": 4} | _Q),
    ("BOFT, LLaMA", _LLAMA, "BOFT", {"boft_block_size": 4} | _Q),
    ("FourierFT, LLaMA", _LLAMA, "FourierFT", {"n_frequency": 20} | _Q),
    ("LN tuning, LLaMA", _LLAMA, "LNTuning", {"target_modules": ["input_layernorm", "norm"]}),
    ("prompt tuning, GPT-2", "GPT2LMHeadModel", "PromptTuning", {"num_virtual_tokens": 3}),
    ("prefix tuning, GPT-2", "GPT2LMHeadModel", "PrefixTuning", {"num_virtual_tokens": 3}),
    ("P-tuning, GPT-2", "GPT2LMHeadModel", "PromptEncoder", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
]  # fmt: skip


def _transformers(name: str) -> Any:
    kind, arguments = _CONFIGURATIONS[name]
    return (_prepared(_model(name, arguments)), *_TASKS[kind])


def _peft(base: str, method: str, arguments: dict[str, Any]) -> Any:
    import peft

    kind, sizes = _CONFIGURATIONS[base]
    task = {"causal": "CAUSAL_LM", "pairs": "SEQ_2_SEQ_LM"}.get(kind)
    model = peft.get_peft_model(_model(base, sizes), getattr(peft, f"{method}Config")(**arguments, task_type=task))
    return (_prepared(model), *_TASKS[kind])


def _model(name: str, arguments: dict[str, Any]) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name.split("_")[0])
    configuration = kind.config_class(**arguments)
    configuration._experts_implementation = "eager"  # the others have no double precision
    return kind(configuration)


def _texts(samples: int) -> tuple[Tensor, ...]:
    ids = torch.randint(4, WORDS, (samples, TOKENS))
    mask = torch.ones_like(ids)
    mask[0, TOKENS - 2 :] = 0
    return ids.where(mask > 0, 2), mask, torch.randint(2, (samples,))


def _images(samples: int, size: int = 32) -> tuple[Tensor, ...]:
    return torch.randn(samples, 3, size, size, dtype=torch.float64), torch.randint(CLASSES, (samples,))


_TASKS: dict[str, tuple[Callable[[int], tuple[Tensor, ...]], Callable[..., Tensor]]] = {
    "causal": (
        _texts,
        lambda model, ids, mask, y: (
            model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss
        ),
    ),
    "text": (_texts, lambda model, ids, mask, y: model(input_ids=ids, attention_mask=mask, labels=y).loss),
    "pairs": (
        _texts,
        lambda model, ids, mask, y: (
            model(input_ids=ids, attention_mask=mask, labels=ids[:, :5].contiguous(), use_cache=False).loss
        ),
    ),
    "image": (_images, lambda model, x, y: model(pixel_values=x, labels=y).loss),
    "features": (_texts, lambda model, ids, mask, y: model(input_ids=ids, attention_mask=mask)[0].square().mean()),
    "speech": (
        lambda samples: (torch.randn(samples, 320, dtype=torch.float64), torch.randint(CLASSES, (samples,))),
        lambda model, x, y: model(input_values=x, labels=y).loss,
    ),
    "speech pairs": (
        lambda samples: (torch.randn(samples, 8, 32, dtype=torch.float64), torch.randint(4, WORDS, (samples, 5))),
        lambda model, x, ids: model(input_features=x, labels=ids, use_cache=False).loss,
    ),
}

_DROPOUTS = "p drop_prob dropout attention_dropout activation_dropout layerdrop drop_path attn_dropout".split()


def _prepared(model: nn.Module) -> nn.Module:
    """In train mode, of double precision and without dropout; parameters that begin at zero are moved."""
    for layer in model.modules():
        for name in _DROPOUTS:
            if isinstance(getattr(layer, name, None), float):
                setattr(layer, name, 0.0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model.double().train()


def cases() -> Iterator[Case]:
    for size, arguments, names in TIMM:
        for name in names.split():
            yield Case("timm", name, lambda n=name, s=size, a=arguments: _timm(n, s, a))  # type: ignore[misc]
    for name in _CONFIGURATIONS:
        yield Case("transformers", name.replace("_", " "), lambda n=name: _transformers(n))  # type: ignore[misc]
    for name, *how in PEFT:
        yield Case("peft", name, lambda h=how: _peft(*h))  # type: ignore[misc]
