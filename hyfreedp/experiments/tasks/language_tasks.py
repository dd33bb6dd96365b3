"""Language tasks: table to text (Tab. gpt2) and causal language modelling (Fig. llama).

A record is one sequence. Its loss is the mean cross-entropy, in nats, over its target tokens: those of the reference
text, or of a whole document; prompt and padding do not count. Protocol: E2E in batches of 1,024 for 10 epochs, as usual
(Li et al., 2022); documents for 3 epochs, as in the paper's §Efficiency; delta is N^-1.1. Runs of the two synthetic
tasks take seconds on two CPU cores.
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
WIDTHS = 16  # records are padded to a multiple of this length, so that a batch has few different shapes
TEST_SHARE = 10  # one in so many documents is for the test
E2E_BATCH, E2E_EPOCHS = 1024, 10
SYNTHETIC = 6_000  # training pairs or documents
# Two CPU cores train such a run, and evaluate it at every fifth step, in seconds.
SMALL_BATCH, SMALL_STEPS, SCORED = 64, 40, 100


@dataclass(frozen=True)
class LanguageTask:
    """One language problem, with attributes as in :class:`hyfreedp.experiments.tasks.registry.Task`, and:

    Attributes:
        models: names in :data:`hyfreedp.experiments.models.language_models.LANGUAGE_MODELS`, the default first.
        scored: how many evaluation sequences, the first, a run is evaluated on; None: all.
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
        """The number of training records that are not held out when settings are chosen; reads the texts."""
        return self.load().validation_start

    @property
    def source(self) -> str:
        """Where the texts come from; reads them."""
        return self.load().source

    def with_source(self, source: str) -> LanguageTask:
        """This task on the documents in a file, see :func:`read_documents`."""
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
        """The architecture of that name; None: the default."""
        return LANGUAGE_MODELS[model or self.models[0]]

    def model(self, seed: int, name: str | None = None, tuning: Tuning = "full") -> PreTrainedModel:
        """A new model (None: the default), see ``language_models.make_language_model``."""
        return make_language_model(name or self.models[0], tuning, seed=seed)

    def datasets(self, evaluation: Evaluation, model: str | None = None) -> tuple[TensorDataset, TensorDataset]:
        """Training and evaluation sequences: tokens and labels, each (N, L), as ``encoding.encode`` returns them.

        ValueError if a sequence is longer than the model's context, or has no target.
        """
        return _records(self, evaluation, model or self.models[0])

    def losses_of(self, model: nn.Module) -> Callable[[Batch], Tensor]:
        """A function from a batch of :func:`shortened` to its per-sample losses (B,), on the model's device."""

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
        """How many records are computed at once, by the model's token budget, padding included."""
        budget = self.architecture(model).token_budget
        return None if budget is None else token_budget(lambda record: record[0].shape[1], budget)

    def evaluate(self, model: nn.Module, data: TensorDataset, name: str | None = None) -> Scores:
        """The share of target tokens predicted correctly, and their mean cross-entropy in nats."""
        tokens, labels = data.tensors
        right, loss, count = 0.0, 0.0, 0
        with torch.no_grad(), eval_mode(model.modules()):
            for batch in pieces(tokens, labels, self.architecture(name).token_budget):
                losses, targets, hits = token_losses(model, *batch, hits=True)
                right += hits.sum().item()
                loss += losses.sum().item()
                count += int(targets.sum())
        return Scores(right / count, loss / count)

    def outputs(self, model: nn.Module, name: str | None = None) -> list[str] | None:
        """The generated sentence for each MR of the test part; None for documents."""
        texts = self.load()
        if texts.documents:
            return None
        from hyfreedp.experiments.tasks.generation import generate

        return generate(model, self.architecture(name).tokenizer(), [meaning for meaning, _ in texts.test])


def pieces(tokens: Tensor, labels: Tensor, budget: int | None) -> Iterator[Batch]:
    """Batches of :func:`shortened` sequences of similar lengths, at most ``budget`` tokens with padding; None: one."""
    lengths = ((labels != IGNORED) * torch.arange(labels.shape[1])).amax(dim=1)
    order = lengths.argsort(descending=True)
    while len(order):
        size = len(order) if budget is None else max(1, budget // int(lengths[order[0]]))
        rows, order = order[:size], order[size:]
        yield shortened(tokens[rows], labels[rows])


def shortened(tokens: Tensor, labels: Tensor, multiple: int = 1) -> Batch:
    """A batch without the columns that do not affect its losses, and with labels shifted to the model's outputs.

    Tokens lose the columns from the last target on, labels those before the first target. Both cuts are moved outwards
    to multiples of ``multiple``. The labels (B, T) belong to the last T columns of the model's output.
    """
    columns = (labels != IGNORED).any(dim=0).nonzero()
    first = (int(columns[0]) - 1) // multiple * multiple
    last = math.ceil(int(columns[-1]) / multiple) * multiple
    last = min(last, tokens.shape[1] - 1)
    return tokens[:, :last], labels[:, first + 1 : last + 1]


def token_losses(model: nn.Module, tokens: Tensor, labels: Tensor, *, hits: bool = False) -> tuple[Tensor, ...]:
    """Cross-entropy of the tokens in a batch of :func:`shortened`, in nats.

    Returns:
        Losses (float32, zero where there is no target), a mask of targets, and with ``hits`` a mask of targets that the
        model finds most probable; each of shape (B, T).
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
    cut = not texts.documents  # one of E2E's test references is longer than our small models' context
    train = TensorDataset(*encode(tokenizer, texts.train[:start], length))
    return train, TensorDataset(*encode(tokenizer, held_out[: task.scored], length, cut=cut))


read_e2e, read_synthetic = cache(e2e), cache(synthetic)


@cache
def read_documents(source: str) -> Texts:
    """The documents in a file, in a fixed random order, the last tenth for the test.

    ValueError if they make fewer than two batches, or cannot be read, see ``texts.documents_from``.
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
OF_DOCUMENTS = "reports"  # the task for which a spec may name a file of other documents
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
