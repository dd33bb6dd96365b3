"""Texts as token ids, by any tokenizer; and our own tokenizer, which ``tools/weights/grammar.py`` makes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hyfreedp.experiments.data.texts import Pair
from hyfreedp.experiments.store.paths import workspace

IGNORED = -100  # label of positions that are no target; torch's cross entropy ignores it by default

PAD, BOS, EOS, SEP = "<pad>", "<bos>", "<eos>", "<sep>"
COMMITTED = "sentences.tokenizer.json"  # in data/checkpoints


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer of ours, with its special tokens, as a tokenizer of transformers."""
    # "<sep>" within a text is encoded as text: only the functions below insert special tokens.
    special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "sep_token": SEP, "split_special_tokens": True}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def own_tokenizer() -> PreTrainedTokenizerFast:
    """The committed tokenizer: a byte-level BPE trained on public sentences, which encodes any text."""
    return wrapped(Tokenizer.from_file(str(workspace().checkpoints / COMMITTED)))


def padding_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the pad token; if there is none, of the end token, which is harmless as padding is masked."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def encode(
    tokenizer: PreTrainedTokenizerBase, records: Sequence[Pair | str], context_length: int, *, cut: bool = False
) -> tuple[Tensor, Tensor]:
    """Token ids of pairs (meaning, separator, reference, end) or of documents (beginning, text, end).

    A missing separator (GPT-2) is replaced by the token of the beginning, and a missing beginning by that of the end.

    Args:
        cut: truncate sequences that are longer than the context, instead of raising ValueError.

    Returns:
        Token ids, int64, shape (N, L), padded on the right; and labels of the same shape: the token itself if it is a
        target (after the separator or the beginning), else ``IGNORED``. Labels are not shifted: the token at position t
        is to be predicted from those before it.

    Raises:
        ValueError: no record; a sequence (or with ``cut`` a meaning) too long; a reference or text without tokens.
    """
    pairs = [record if isinstance(record, Pair) else Pair("", record) for record in records]
    documents = isinstance(next(iter(records), ""), str)
    first = (_beginning if documents else _separator)(tokenizer)
    meanings = _ids(tokenizer, [pair.meaning for pair in pairs])
    references = _ids(tokenizer, [pair.reference for pair in pairs])
    if not all(references):
        raise ValueError(f"every text to learn must have a token, that of record {references.index([]) + 1} has none")
    prompts = [[*meaning, first] for meaning in meanings]
    sequences = [[*prompt, *text, tokenizer.eos_token_id] for prompt, text in zip(prompts, references, strict=True)]
    if cut and max(map(len, prompts)) < context_length:  # so that each keeps at least one target
        sequences = [sequence[:context_length] for sequence in sequences]
    for number, sequence in enumerate(sequences, start=1):
        if (found := len(sequence)) > context_length:
            raise ValueError(f"a record must have at most {context_length} tokens, the context; {number} has {found}")
    tokens = pad_sequence([torch.tensor(sequence) for sequence in sequences], True, padding_of(tokenizer))
    labels = [
        torch.tensor([IGNORED] * len(prompt) + sequence[len(prompt) :])
        for sequence, prompt in zip(sequences, prompts, strict=True)
    ]
    return tokens, pad_sequence(labels, True, IGNORED)


def encode_prompts(tokenizer: PreTrainedTokenizerBase, meanings: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Prompts for generation: each meaning and a separator. ValueError if there is no meaning.

    Returns:
        Token ids, int64, shape (N, L), padded on the left; and the attention mask of the same shape, 1 at tokens.
    """
    sequences = [torch.tensor([*ids, _separator(tokenizer)]) for ids in _ids(tokenizer, meanings)]
    tokens = pad_sequence(sequences, True, padding_of(tokenizer), "left")
    return tokens, pad_sequence([torch.ones_like(sequence) for sequence in sequences], True, 0, "left")


def _ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        raise ValueError("there must be at least one text to encode, got none")
    return tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]


def _separator(tokenizer: PreTrainedTokenizerBase) -> int:
    return _beginning(tokenizer) if tokenizer.sep_token_id is None else tokenizer.sep_token_id


def _beginning(tokenizer: PreTrainedTokenizerBase) -> int:
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
