"""The models to measure: small versions of current ones, with random weights, a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

CLASSES, SAMPLES, TOKENS, WORDS = 5, 3, 8, 48


@dataclass(frozen=True)
class Case:
    """A small version of a model.

    Attributes:
        library, name: the library, and the model's name there.
        build: returns a model, in train mode and double precision; a function that makes a batch of a given number of
            samples; and ``loss(model, *batch)``, the mean over a batch, as written without privacy.
    """

    library: str
    name: str
    build: Callable[[], tuple[nn.Module, Callable[[int], tuple[Tensor, ...]], Callable[..., Tensor]]]


ROWS: dict[str, list[Any]] = yaml.safe_load(Path(__file__).with_name("catalog.yaml").read_text(encoding="utf-8"))
_CONFIGURATIONS = {name: (kind, arguments) for kind, arguments, names in ROWS["transformers"] for name in names}


def _timm(name: str, size: int, arguments: dict[str, Any]) -> Any:
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **arguments)
    return _prepared(model), partial(_images, size=size), _of_logits


def _of_logits(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output = model(x)
    return F.cross_entropy(sum(output) if isinstance(output, tuple) else output, y)


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
    kind = getattr(transformers, name.split()[0])
    configuration = kind.config_class(**arguments)
    configuration._experts_implementation = "batched_mm"  # "eager" cannot be mapped, "grouped_mm" has no float64
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
    """The model in train mode and double precision, without dropout; noise moves parameters away from zero."""
    for layer in model.modules():
        for name in _DROPOUTS:
            if isinstance(getattr(layer, name, None), float):
                setattr(layer, name, 0.0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model.double().train()


def cases() -> Iterator[Case]:
    for size, arguments, names in ROWS["timm"]:
        for name in names:
            yield Case("timm", name, partial(_timm, name, size, arguments))
    for name in _CONFIGURATIONS:
        yield Case("transformers", name, partial(_transformers, name))
    for name, *how in ROWS["peft"]:
        yield Case("peft", name, partial(_peft, *how))
