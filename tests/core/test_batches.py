"""Batches of any structure: the partition by token budget is exact, and a step does not depend on it."""

import collections
import itertools

import pytest
import torch
from cases import together
from hypothesis import given
from hypothesis import strategies as st
from twins import PRESETS, by_hand, flat, refused, steps

from hyfreedp import token_budget
from hyfreedp.data.batches import batch_length, split_rows, take


def by_length(budget):
    """The budget for batches that are their own lengths."""
    return token_budget(lambda batch: batch, budget)


@given(lengths=st.lists(st.integers(0, 60), max_size=40), budget=st.integers(1, 200))
def test_pieces_are_a_partition_within_the_budget(lengths, budget):
    """Every sample once; padded tokens within the budget; neighbours could not have been joined."""
    lengths = torch.tensor(lengths, dtype=torch.long)
    pieces = split_rows(lengths, by_length(budget))
    assert sorted(row for piece in pieces for row in piece.tolist()) == list(range(len(lengths)))
    assert all(len(piece) == 1 or 1 < len(piece) <= budget / max(1, lengths[piece].max()) for piece in pieces)
    for piece, following in itertools.pairwise(pieces):
        assert lengths[piece].min() >= lengths[following].max()
        assert (len(piece) + 1) * max(1, lengths[piece].max()) > budget


@together(
    ("pieces", "message"),
    [
        ([[0, 1], [3, 4]], "each of the 5 samples .* exactly once in all its pieces, got position 2 0 times"),
        ([[0, 1, 2], [2, 3, 4]], "got position 2 2 times"),
        ([[-1, 0, 1, 2, 3]], "got position -1, which is none of 0 ... 4"),
        ([torch.arange(5.0)], "one-dimensional integer tensors, got tensor"),
    ],
)
def test_what_is_no_partition_is_refused_before_anything_is_released(pieces, message):
    """A sample in two pieces would have twice the sensitivity that the noise is made for."""
    optimizer = by_hand(max_physical_batch_size=lambda batch: pieces)
    with refused(optimizer, message):
        steps(optimizer, [5])


def test_take_keeps_the_kind_of_a_mapping():
    """Whose methods a loss function may use, as ``batch.to(device)``; what cannot be made of entries is a dict."""
    from transformers import BatchEncoding

    entries = {"ids": torch.arange(12).view(4, 3), "names": ["a", "b", "c", "d"]}
    for kind in (dict, collections.OrderedDict, collections.UserDict, BatchEncoding):
        taken = take(kind(entries), torch.tensor([2, 0]))
        assert type(taken) is kind and taken["ids"].tolist() == [[6, 7, 8], [0, 1, 2]] and taken["names"] == ["c", "a"]
    assert take(BatchEncoding(entries), slice(1, 2)).to("cpu").ids.tolist() == [[3, 4, 5]]
    assert type(take(collections.defaultdict(list, entries), slice(0, 1))) is dict


@together("batch", [7, "text", object(), ["a", "b"], {}, [], {"names": ["a", "b"]}])
def test_a_batch_without_a_tensor_is_refused(batch):
    with pytest.raises(TypeError, match="batch must"):
        batch_length(batch)


def shuffled(batch):
    """Pieces of several sizes in an order of their own."""
    order = torch.randperm(len(batch[1]), generator=torch.Generator().manual_seed(len(batch[1])))
    return [order[:2], order[2:3].tolist(), *order[3:].split(4)]


@together("preset", PRESETS.values())
def test_a_run_in_pieces_of_any_order_is_the_run_in_one_piece(preset, unbound_noise):
    """Weights, learning rates and the raw values; an empty batch too."""
    runs = {}
    for name, partition in {"whole": None, "pieces": shuffled}.items():
        settings = {"preset": preset, "target_epsilon": 3.0, "accountant": "rdp", "diagnostics": True}
        optimizer = by_hand(max_physical_batch_size=partition, **settings)
        records = steps(optimizer, [8, 5, 0, 9])
        told = ([getattr(record, key) for record in records] for key in ("eta", "diagnostics"))
        runs[name] = flat(optimizer.module), *told
    for whole, pieces in zip(runs["whole"], runs["pieces"], strict=True):
        torch.testing.assert_close(whole, pieces, rtol=1e-9, atol=1e-12, equal_nan=True)
