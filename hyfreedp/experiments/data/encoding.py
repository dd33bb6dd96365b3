"""Texts as token ids: a tokenizer of our own (made by ``tools/weights/grammar.py``), batches for any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hyfreedp.experiments.data.texts import Pair
from hyfreedp.experiments.store.paths import workspace

IGNORED = -100  # label of a position that is no target, as torch's cross entropy has it

PAD, BOS, EOS, SEP = "<pad>", "<bos>", "<eos>", "<sep>"
COMMITTED = "sentences.tokenizer.json"  # in data/checkpoints


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer of ours with its special tokens, as transformers takes it."""
    # A text that contains "<sep>" is text: special tokens are only put in by the functions below.
    special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "sep_token": SEP, "split_special_tokens": True}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def own_tokenizer() -> PreTrainedTokenizerFast:
    """The committed one: byte-level BPE, made from public sentences; it encodes any text."""
    return wrapped(Tokenizer.from_file(str(workspace().checkpoints / COMMITTED)))


def padding_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id used for padding: the pad token's, or else the end token's, for padded positions are masked."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def encode(
    tokenizer: PreTrainedTokenizerBase, records: Sequence[Pair | str], context_length: int, *, cut: bool = False
) -> tuple[Tensor, Tensor]:
    """Pairs as sequences of meaning, separator, reference and end; or documents, of beginning, text and end.

    Where the tokenizer has no separator or beginning, its token for the beginning or the end of a sequence stands there
    (GPT-2).

    Args:
        cut: whether sequences longer than the context are cut off there, and not refused.

    Returns:
        Token ids, int64, shape (N, L), padded on the right; and labels of the same shape: the token itself where it is
        a target (all behind the separator or beginning), else ``IGNORED``. Position t is to be predicted from those
        before it.

    Raises:
        ValueError: no record; a sequence, or the meaning of one that is cut, is too long; a reference or text is empty.
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
    if cut and max(map(len, prompts)) < context_length:  # a target is left of each
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
    """Meanings and separators to generate from; ValueError if there is none.

    Returns:
        Token ids, int64, shape (N, L), padded on the left to the longest; and a mask of the same shape, 1 at tokens.
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
