"""Language tasks: table to text (Tab. gpt2) and causal language modelling (Fig. llama).

A record is one sequence. Its loss is the mean cross-entropy over its own target tokens, in nats: the sentence that a
meaning representation asks for, or a whole document; prompt and padding count nothing. Protocol: E2E with batches of
1,024 for 10 epochs, as is usual there (Li et al., 2022), documents for 3 epochs as in the paper's §Efficiency; delta is
N^-1.1. The other tasks have runs that two CPU cores train in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hyfreedp import token_budget
from hyfreedp.data.batches import PhysicalBatchSize
from hyfreedp.experiments.data.encoding import IGNORED, encode
from hyfreedp.experiments.data.texts import E2E_TRAIN, Pair, Texts, documents_from, e2e, synthetic
from hyfreedp.experiments.models.image_models import Tuning
from hyfreedp.experiments.models.language_models import LANGUAGE_MODELS, LanguageModel, make_language_model
from hyfreedp.experiments.tasks.scores import Evaluation, Scores
from hyfreedp.pytorch.layers import eval_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = tuple[Tensor, Tensor]
DOCUMENT_BATCH, DOCUMENT_EPOCHS = 200, 3
WIDTHS = 16  # records are as wide as a multiple of it, so that few forms are in a batch
TEST_SHARE = 10  # one in ten documents is for the test
E2E_BATCH, E2E_EPOCHS = 1024, 10
SYNTHETIC = 6_000  # pairs or documents that train
# What two CPU cores train, and score at every fifth step, in seconds.
SMALL_BATCH, SMALL_STEPS, SCORED = 64, 40, 100


@dataclass(frozen=True)
class LanguageTask:
    """One language problem; the attributes are those of :class:`hyfreedp.experiments.tasks.registry.Task`.

    Attributes:
        models: names in :data:`hyfreedp.experiments.models.language_models.LANGUAGE_MODELS`, the task's own first.
        scored: sequences of the held-out part, from its start, that a run is scored on; all if None.
    """

    title: str
    models: tuple[str, ...]
    train_size: int
    batch_size: int
    steps: int
    delta: float
    load: Callable[[], Texts]
    scored: int | None = None
    evaluations: int = 20

    @property
    def validation_start(self) -> int:
        """How many of these records train where settings are chosen; the texts are read for it."""
        return self.load().validation_start

    @property
    def source(self) -> str:
        """Where the texts come from, which are read for it."""
        return self.load().source

    def with_source(self, source: str) -> LanguageTask:
        """This task on the documents of a file, see :func:`read_documents`."""
        texts = read_documents(source)
        size = len(texts.train)
        return replace(
            self,
            title=f"documents ({size:,})",
            train_size=size,
            batch_size=DOCUMENT_BATCH,
            steps=DOCUMENT_EPOCHS * math.ceil(size / DOCUMENT_BATCH),
            delta=size**-1.1,
            load=partial(read_documents, source),
            scored=None,
        )

    def architecture(self, model: str | None) -> LanguageModel:
        """The model of that name, the task's own if None."""
        return LANGUAGE_MODELS[model or self.models[0]]

    def model(self, seed: int, name: str | None = None, tuning: Tuning = "full") -> PreTrainedModel:
        """A model, the task's own if None; see ``language_models.make_language_model``."""
        return make_language_model(name or self.models[0], tuning, seed=seed)

    def datasets(self, evaluation: Evaluation, model: str | None = None) -> tuple[TensorDataset, TensorDataset]:
        """Training and evaluation sequences, as tokens and labels of shape (N, L), padded on the right.

        ``labels`` are the tokens where they are targets, and ``IGNORED`` elsewhere.

        Raises:
            ValueError: a sequence is longer than the model's context, or has no target.
        """
        return _records(self, evaluation, model or self.models[0])

    def losses_of(self, model: nn.Module) -> Callable[[Batch], Tensor]:
        """Per-sample losses, shape (B,), of what :func:`shortened` gives, which goes to the model's device."""

        def per_sample_loss(batch: Batch) -> Tensor:
            losses, targets = token_losses(model, *batch)
            return losses.sum(dim=1) / targets.sum(dim=1)

        return per_sample_loss

    @staticmethod
    def collate(records: list[Batch]) -> Batch:
        """One record as a batch."""
        ((tokens, labels),) = records
        return shortened(tokens[None], labels[None], WIDTHS)

    def physical_batches(self, model: str | None) -> PhysicalBatchSize:
        """Records at once by the model's token budget, padding included."""
        budget = self.architecture(model).token_budget
        return None if budget is None else token_budget(lambda record: record[0].shape[1], budget)

    def evaluate(self, model: nn.Module, data: TensorDataset, name: str | None = None) -> Scores:
        """Over all target tokens: the share predicted right, and the mean cross-entropy in nats."""
        tokens, labels = data.tensors
        right, loss, count = 0.0, 0.0, 0
        with torch.no_grad(), eval_mode(model.modules()):
            for batch in pieces(tokens, labels, self.architecture(name).token_budget):
                losses, targets, hits = token_losses(model, *batch, hits=True)
                right, loss, count = right + hits.sum().item(), loss + losses.sum().item(), count + int(targets.sum())
        return Scores(right / count, loss / count)

    def outputs(self, model: nn.Module, name: str | None = None) -> list[str] | None:
        """The sentence for each meaning representation of the test part; None for documents."""
        if (texts := self.load()).documents:
            return None
        from hyfreedp.experiments.tasks.generation import generate

        return generate(model, self.architecture(name).tokenizer(), [meaning for meaning, _ in texts.test])


def pieces(tokens: Tensor, labels: Tensor, budget: int | None) -> Iterator[Batch]:
    """Sequences of like lengths together, shortened, of ``budget`` tokens at most with padding; all at once if None."""
    lengths = ((labels != IGNORED) * torch.arange(labels.shape[1])).amax(dim=1)
    order = lengths.argsort(descending=True)
    while len(order):
        size = len(order) if budget is None else max(1, budget // int(lengths[order[0]]))
        rows, order = order[:size], order[size:]
        yield shortened(tokens[rows], labels[rows])


def shortened(tokens: Tensor, labels: Tensor, multiple: int = 1) -> Batch:
    """A batch without the columns that its losses need not: behind the last target, and labels before the first.

    Both ends are rounded out to a multiple. The labels are those of the last columns of the model's output.
    """
    columns = (labels != IGNORED).any(dim=0).nonzero()
    first, last = (int(columns[0]) - 1) // multiple * multiple, -(-int(columns[-1]) // multiple) * multiple
    last = min(last, tokens.shape[1] - 1)
    return tokens[:, :last], labels[:, first + 1 : last + 1]


def token_losses(model: nn.Module, tokens: Tensor, labels: Tensor, *, hits: bool = False) -> tuple[Tensor, ...]:
    """Cross-entropy of every target token in nats, zero elsewhere, of what :func:`shortened` gives.

    Returns:
        Losses, float32, which positions are targets, and if asked for which targets are the most probable token; all of
        one shape (B, T).
    """
    device = next(model.parameters()).device
    tokens, labels = tokens.to(device), labels.to(device)
    logits = model(input_ids=tokens, use_cache=False, logits_to_keep=labels.shape[1]).logits.float()
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    targets = labels != IGNORED
    return (losses, targets, (logits.argmax(dim=2) == labels) & targets) if hits else (losses, targets)


@cache
def _records(task: LanguageTask, evaluation: Evaluation, model: str) -> tuple[TensorDataset, TensorDataset]:
    architecture, texts = LANGUAGE_MODELS[model], task.load()
    tokenizer, length = architecture.tokenizer(), architecture.context_length
    start = len(texts.train) if evaluation == "test" else texts.validation_start
    held_out = texts.train[start:]
    if evaluation == "test":
        references = ([Pair(meaning, text) for text in several] for meaning, several in texts.test)
        held_out = texts.test if texts.documents else [*chain.from_iterable(references)]
    cut = not texts.documents  # one reference of E2E's tests is longer than our small model's context
    train = TensorDataset(*encode(tokenizer, texts.train[:start], length))
    return train, TensorDataset(*encode(tokenizer, held_out[: task.scored], length, cut=cut))


read_e2e, read_synthetic = cache(e2e), cache(synthetic)


@cache
def read_documents(source: str) -> Texts:
    """The documents of a file: in one fixed random order, the last tenth of them for the test.

    Raises:
        ValueError: there are fewer than two batches of them, or it cannot be read, see ``texts.documents_from``.
    """
    documents = documents_from(source)
    size = len(documents) - len(documents) // TEST_SHARE
    if size < 2 * DOCUMENT_BATCH:
        raise ValueError(
            f"source {source!r} has {len(documents)} documents, of which {size} would train: private training needs at "
            f"least {2 * DOCUMENT_BATCH}, two batches"
        )
    order = np.random.default_rng(0).permutation(len(documents))
    shuffled = [documents[index] for index in order]
    return Texts(shuffled[:size], shuffled[size:], size * 4 // 5, source)


def _small(title: str, models: tuple[str, ...], name: str) -> LanguageTask:
    load = partial(read_synthetic, name)
    return LanguageTask(title, models, SYNTHETIC, SMALL_BATCH, SMALL_STEPS, SYNTHETIC**-1.1, load, SCORED)


_OWN = ("gpt2_sentences", "gpt2_tiny")
_LARGE = ("gpt2_small_sentences", "gpt2", "gpt2_small")
OF_DOCUMENTS = "reports"  # the task whose documents a spec may replace
LANGUAGE_TASKS = {
    "restaurants": _small(f"restaurants (synthetic, {SYNTHETIC:,} pairs)", _OWN + _LARGE, "restaurants"),
    "e2e": LanguageTask(
        f"E2E ({E2E_TRAIN:,} pairs)",
        (*_LARGE, *_OWN, "gpt2_sentences_fused"),
        train_size=E2E_TRAIN,
        batch_size=E2E_BATCH,
        steps=E2E_EPOCHS * math.ceil(E2E_TRAIN / E2E_BATCH),
        delta=E2E_TRAIN**-1.1,
        load=read_e2e,
        evaluations=5,
    ),
    OF_DOCUMENTS: _small(
        f"reports (synthetic, {SYNTHETIC:,} documents)", ("llama_sentences", "llama_tiny", "llama2_7b"), "reports"
    ),
}
