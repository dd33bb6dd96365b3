"""Small models of every supported kind, each with a batch and the loss of a record."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version

import pytest
import torch
import torch.nn.functional as F
from catalog import cases
from torch import Tensor, nn
from twins import Built

from hyfreedp.gradients import AutomaticClipping, Clipping, GradientEngine

CATALOG = {f"{case.library}/{case.name}": case for case in cases()}


@dataclass
class Example:
    """A model, a batch (records in dimension 0 of every tensor) and ``loss(model, *batch)``: (B,), or one number."""

    model: nn.Module
    batch: tuple[Tensor, ...]
    loss: Callable[..., Tensor]

    def losses(self, rows: slice = slice(None)) -> Tensor:
        return self.loss(self.model, *(tensor[rows] for tensor in self.batch))

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def gradients(self) -> Tensor:
        """Every sample's gradient, shape (B, D), from forward and backward passes of one sample at a time."""
        rows = []
        for i in range(len(self.batch[0])):
            loss = self.losses(slice(i, i + 1)).squeeze()
            gradients = torch.autograd.grad(loss, self.trainable, allow_unused=True, materialize_grads=True)
            rows.append(torch.cat([g.flatten() for g in gradients]))
        return torch.stack(rows)

    def clipped(self, clipping: Clipping | None = None) -> tuple[Tensor, Tensor]:
        """The norms (B,), inf where not finite, and the clipped sum (D,) that an engine must reproduce."""
        gradients, clipping = self.gradients(), clipping or AutomaticClipping()
        finite = gradients.isfinite().all(1)
        norms = gradients.norm(dim=1).where(finite, torch.inf)
        return norms, clipping.factors(norms[finite]).to(gradients.dtype) @ gradients[finite]

    def by_engine(self, engine: GradientEngine, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """The same from an engine, by :meth:`GradientEngine.clipped_sums`."""
        batch = tuple(tensor[rows] for tensor in self.batch)
        sums, _, norms = engine.clipped_sums(lambda batch: self.loss(self.model, *batch), batch)
        return norms, torch.cat([sums[p].flatten() for p in self.trainable])

    def looped(self) -> "Example":
        """The same, which can only be computed one record at a time."""

        def loss(model: nn.Module, *batch: Tensor) -> Tensor:
            _ = batch[0].data  # memory, which no map shows
            return self.loss(model, *batch)

        return replace(self, loss=loss)


def assert_exact(
    example: Example,
    engine: GradientEngine | None = None,
    *,
    clipping: Clipping | None = None,
    slow: str | None = None,
    rtol: float = 1e-9,
) -> GradientEngine:
    """Norms and clipped sum of a loop over samples, of the first batch and of one after it.

    Args:
        slow: a pattern of the reason why samples are computed one at a time; None if all must be mapped.
    """
    clipping = clipping or AutomaticClipping()
    engine = engine or GradientEngine(example.model, clipping)
    expected = example.clipped(clipping)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for one, other in zip(example.by_engine(engine), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=rtol, atol=1e-12)
    said = [str(w.message) for w in caught if "samples are computed one at a time" in str(w.message)]
    if slow is None:
        assert engine.fallback_reason is None and not said, engine.fallback_reason
    else:
        assert engine.fallback_reason is not None and re.search(slow, engine.fallback_reason), engine.fallback_reason
        assert len(said) == 1 and engine.fallback_reason in said[0]
    return engine


def biases_only(model: nn.Module, head: str = "\0") -> None:
    """BitFit: freeze everything but biases and the parameters whose name starts with ``head``."""
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias") or name.startswith(head))


def mlp() -> Example:
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(inplace=True), nn.Linear(16, 3))
    return classifier(model, torch.randn(5, 6).double(), classes=3)


def groupnorm_convnet() -> Example:
    """Overlapping, strided, grouped, dilated and 'same' convolutions, with in-place activations."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, (3, 2), padding="same", dilation=2),
        nn.GroupNorm(4, 16),
        nn.Tanh(),
        nn.Conv2d(16, 40, 4, stride=4),
        nn.Flatten(),
        nn.Linear(40, 3),
    )
    return classifier(model, torch.randn(5, 3, 8, 8).double(), classes=3)


def conv1d_net() -> Example:
    model = nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv1d(8, 8, 4, stride=2, padding="valid", groups=2),
        nn.Conv1d(8, 32, 2, dilation=2),
        nn.Flatten(),
        nn.Linear(96, 3),
    )
    return classifier(model, torch.randn(5, 3, 12).double(), classes=3)


def tied_language_model() -> Example:
    """Embedding and head share their table, one block is used twice, positions are embedded once for all samples."""

    def logits(m: nn.Module, ids: Tensor) -> Tensor:
        x = m.embedding(ids) + m.positions(torch.arange(ids.shape[1], device=ids.device)[None])
        return m.head(m.block(m.block(x)))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).mT[..., :-1], ids[:, 1:], reduction="none", ignore_index=0).sum(1)

    parts = {"embedding": nn.Embedding(13, 8, padding_idx=0), "positions": nn.Embedding(7, 8), "head": nn.Linear(8, 13)}
    parts["block"] = nn.Sequential(nn.RMSNorm(8, eps=1e-5), nn.Linear(8, 8), nn.GELU())
    parts["head"].weight = parts["embedding"].weight
    ids = torch.randint(1, 13, (5, 7))
    ids[:2, 4:] = 0
    ids[3] = 1  # a token that occurs many times in a sample
    return Example(Built(logits, **parts).double(), (ids,), loss)


def of_catalog(name: str) -> Example:
    """A model of timm, transformers or peft in ``tools/models/catalog.yaml``, as "timm/resnet18", with four samples."""
    if version("transformers") < "5" and any(word in name for word in ("GPT2", "LLaMA", "Llama", "Bert")):
        pytest.skip("masks of transformers 4 overflow in double precision")
    model, batch, loss = CATALOG[name].build()
    return Example(model, batch(4), loss)


def classifier(model: nn.Module, x: Tensor, classes: int) -> Example:
    """A model, in train mode and of the type of these inputs, with random labels."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    return Example(model.to(x.dtype).train(), (x, torch.randint(classes, (len(x),))), loss)
