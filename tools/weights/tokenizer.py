"""Makes the committed tokenizer again: ``python tools/weights/tokenizer.py``.

It is byte-level, so it encodes any text, and trained on public text only: a vocabulary made from private text would
tell of it without any privacy.
"""

from __future__ import annotations

from collections.abc import Iterable

from grammar import documents, pairs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hyfreedp.experiments.data.encoding import BOS, COMMITTED, EOS, PAD, SEP, wrapped
from hyfreedp.experiments.store.files import write_text
from hyfreedp.experiments.store.paths import workspace

VOCABULARY = 600
SEED, PAIRS, DOCUMENTS = 0, 6000, 1000  # of the public text that the committed tokenizer is made of


def public_texts() -> Iterable[str]:
    """What the committed tokenizer is trained on: synthetic, of the public domain alone."""
    for pair in pairs("public", PAIRS, SEED):
        yield from (pair.meaning, pair.reference)
    yield from documents("public", DOCUMENTS, SEED)


def train_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019); the same texts give the same one.

    ``size`` is its number of tokens: four special ones, 256 bytes, and merges as far as the texts have any.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[PAD, BOS, EOS, SEP], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return wrapped(tokenizer)


if __name__ == "__main__":
    tokenizer = train_tokenizer(public_texts(), VOCABULARY).backend_tokenizer.to_str(pretty=True)
    write_text(workspace().checkpoints / COMMITTED, tokenizer + "\n")
