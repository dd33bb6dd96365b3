"""Texts as token ids: a tokenizer of our own (made by ``tools/weights/tokenizer.py``), batches for any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hyfreedp.experiments.data.grammar import Pair
from hyfreedp.experiments.store.paths import workspace

IGNORED = -100  # label of a position that is no target, as torch's cross entropy has it

PAD, BOS, EOS, SEP = "<pad>", "<bos>", "<eos>", "<sep>"
COMMITTED = "sentences.tokenizer.json"  # in data/checkpoints


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    # A text that contains "<sep>" is text: special tokens are only put in by the functions below.
    special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "sep_token": SEP, "split_special_tokens": True}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def load_tokenizer() -> PreTrainedTokenizerFast:
    """The committed tokenizer."""
    return _wrapped(Tokenizer.from_file(str(workspace().checkpoints / COMMITTED)))


def padding_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id used for padding: the pad token's, or else the end token's, for padded positions are masked."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], context_length: int, *, cut: bool = False
) -> tuple[Tensor, Tensor]:
    """Pairs as sequences: meaning, separator, reference, end.

    The separator is the tokenizer's, or its token for the beginning or the end of a sequence where it has none (GPT-2).

    Args:
        cut: whether sequences longer than the context are cut off there, and not refused.

    Returns:
        Token ids, int64, shape (N, L), padded on the right; and labels of the same shape: the token itself where it is
        a target (reference and end), else ``IGNORED``. Position t is to be predicted from those before it.

    Raises:
        ValueError: no pair; a sequence, or the meaning of one that is cut, is too long; a reference is empty.
    """
    padding, separator, end = padding_of(tokenizer), _separator(tokenizer), tokenizer.eos_token_id
    meanings = _ids(tokenizer, [pair.meaning for pair in pairs])
    references = _ids(tokenizer, [pair.reference for pair in pairs])
    if not all(references):
        raise ValueError(f"every reference must have a token, that of pair {references.index([]) + 1} has none")
    sequences = [
        [*meaning, separator, *reference, end] for meaning, reference in zip(meanings, references, strict=True)
    ]
    if cut and max(map(len, meanings)) + 1 < context_length:  # a target is left of each
        sequences = [sequence[:context_length] for sequence in sequences]
    return _with_labels(sequences, [len(meaning) + 1 for meaning in meanings], padding, context_length, "pair")


def encode_documents(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], context_length: int
) -> tuple[Tensor, Tensor]:
    """Documents as sequences: beginning (or end, where there is no such token), text, end.

    Results and errors as of :func:`encode_pairs`: every token but the first is a target.
    """
    padding, end = padding_of(tokenizer), tokenizer.eos_token_id
    start = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    texts = _ids(tokenizer, documents)
    if not all(texts):
        raise ValueError(f"every document must have a token, number {texts.index([]) + 1} has none")
    return _with_labels([[start, *text, end] for text in texts], [1] * len(texts), padding, context_length, "document")


def encode_prompts(tokenizer: PreTrainedTokenizerBase, meanings: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Meanings and separators to generate from; ValueError if there is none.

    Returns:
        Token ids, int64, shape (N, L), padded on the left to the longest; and a mask of the same shape, 1 at tokens.
    """
    padding, separator = padding_of(tokenizer), _separator(tokenizer)
    sequences = [torch.tensor([*ids, separator]) for ids in _ids(tokenizer, meanings)]
    tokens = pad_sequence(sequences, True, padding, "left")
    return tokens, pad_sequence([torch.ones_like(sequence) for sequence in sequences], True, 0, "left")


def _ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        raise ValueError("there must be at least one text to encode, got none")
    distinct = list(dict.fromkeys(texts))  # many references share a meaning
    ids = tokenizer(distinct, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    known = dict(zip(distinct, ids, strict=True))
    return [known[text] for text in texts]


def _separator(tokenizer: PreTrainedTokenizerBase) -> int:
    tokens = tokenizer.sep_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id
    return next(token for token in tokens if token is not None)


def _with_labels(
    sequences: list[list[int]], prompts: list[int], padding: int, context_length: int, kind: str
) -> tuple[Tensor, Tensor]:
    """Padded on the right; the first ``prompts`` tokens of each are no targets."""
    for number, sequence in enumerate(sequences, start=1):
        if len(sequence) > context_length:
            raise ValueError(
                f"no {kind} may have more tokens than the context length, {context_length}: number {number} has "
                f"{len(sequence)}"
            )
    tokens = pad_sequence([torch.tensor(sequence) for sequence in sequences], True, padding)
    labels = [
        torch.tensor([IGNORED] * prompt + sequence[prompt:])
        for sequence, prompt in zip(sequences, prompts, strict=True)
    ]
    return tokens, pad_sequence(labels, True, IGNORED)
