"""Batches of any structure: records of one form are stacked, and none is seen in the place of another."""

import dataclasses
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import PRESETS, by_hand, flat, refused, steps, unstacked

from hyfreedp import token_budget
from hyfreedp.data.batches import Group, batch_length, groups_of, map_leaves, stack_records
from hyfreedp.gradients.pieces import MOST_TOGETHER, Partition


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Fields:
    x: Any
    y: Any


# -- any structure, any values -----------------------------------------------------------------------------------------

VALUES = st.sampled_from([0, 1, True, False, None, 0.0, -0.0, 1.0, "1", b"1", "a", (), []])
TENSORS = st.tuples(st.integers(0, 3), st.sampled_from([torch.float32, torch.int64]), st.integers(0, 9)).map(
    lambda made: torch.full((made[0],), made[2], dtype=made[1])
)
RECORDS = st.recursive(
    VALUES | TENSORS,
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.dictionaries(st.sampled_from(["x", "y", 1]), parts, max_size=2)
        | st.tuples(parts, parts)
        | st.builds(Pair, parts, parts)
        | st.builds(Fields, parts, parts)
    ),
    max_leaves=5,
)


@settings(max_examples=50)
@given(records=st.lists(RECORDS, max_size=8), size=st.integers(1, 4), data=st.data())
def test_each_record_comes_out_as_it_went_in(records, size, data):
    """Whatever the others are, in pieces too, and after it was sent to a process."""
    batch = stack_records(records)
    assert len(batch) == batch_length(batch) == len(records)
    sent = pickle.loads(pickle.dumps(batch)).to("cpu")
    partitions = Partition.of(sent, size), Partition.of(batch, lambda record: size)
    for groups in (batch.groups, *([piece.group for piece in one.pieces] for one in partitions)):
        found = unstacked(groups)
        assert sorted(found) == list(range(len(records))) and sum(map(len, groups)) == len(records)
        assert [repr(found[row]) for row in range(len(records))] == list(map(repr, records))
    for group in batch.groups:
        rows = torch.tensor(data.draw(st.permutations(range(len(group)))))
        assert torch.equal(group.take(rows).rows, group.rows[rows])


class Lies:
    """Equal to all others, also where it is pickled."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0

    def __reduce__(self):
        return Lies, (0,)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, True),
        ("1", b"1"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([1], (1,)),
        (Pair(1, 2), (1, 2)),
        (Lies(1), Lies(2)),
        (np.zeros(2), np.ones(2)),
        (np.float64(0.0), np.float64(-0.0)),
    ],
)
def test_what_is_no_tensor_is_never_another_records(first, second):
    assert len(stack_records([{"x": torch.zeros(2), "y": [rest]} for rest in (first, second)]).groups) == 2


def test_memory_that_is_used_again_is_copied_before():
    """A collate function with a buffer of its own made every record the last one."""
    buffer, array = torch.zeros(2), np.zeros(1)

    def records():
        for i in range(3):
            array[:] = i
            yield {"x": buffer.fill_(i), "meta": array}

    found = unstacked(stack_records(records()).groups)
    assert [(found[i]["x"].tolist(), found[i]["meta"].tolist()) for i in range(3)] == [([i, i], [i]) for i in range(3)]


# -- plain batches -----------------------------------------------------------------------------------------------------


def test_a_record_of_a_plain_batch_is_a_batch_of_one_row():
    x, y = torch.arange(12.0).view(4, 3), torch.arange(4)
    for batch in ([x, y], (x, y), Pair(x, y), Fields(x, y), {"x": x, "y": {"z": (y, y)}}):
        (group,) = groups_of(batch)
        assert isinstance(group, Group) and [tensor.shape[:2] for tensor in group.tensors][:2] == [(4, 1), (4, 1)]
        for row, record in unstacked([group]).items():
            assert repr(record) == repr(map_leaves(lambda tensor, row=row: tensor[row : row + 1], batch))
        assert groups_of(map_leaves(lambda tensor: tensor[:0], batch)) == []


def test_a_list_without_tensors_has_one_entry_of_each_record():
    x = torch.arange(4.0)
    groups = groups_of({"x": x, "names": ["a", "b", "a", "c"], "more": [x, ("k", "k", "k", "k")]})
    assert [group.rows.tolist() for group in groups] == [[0, 2], [1], [3]]
    assert repr(unstacked(groups)[2]) == repr({"x": x[2:3], "names": ["a"], "more": [x[2:3], ("k",)]})


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        (torch.tensor(1.0), ValueError, r"got one of shape \(\) beside 4 samples: what all samples share"),
        (1, TypeError, "got int, which cannot be divided"),
    ],
)
def test_what_samples_share_is_refused(more, error, message):
    with pytest.raises(error, match=message):
        batch_length([torch.ones(4), more])


def test_records_are_not_taken_apart():
    batch = stack_records([(torch.ones(1), torch.ones(1))] * 2)
    for use in (lambda: batch[0], lambda: batch["x"], lambda: list(batch), lambda: [x for x, _ in batch]):
        with pytest.raises(TypeError, match=r"pass it to optimizer\.step as it is, .* batch\.to\(device\) moves it"):
            use()
    assert "tensor" not in repr((batch, batch.groups))  # a traceback with local variables would show records


# -- pieces for memory -------------------------------------------------------------------------------------------------


def of_lengths(lengths):
    return stack_records({"input_ids": torch.zeros(1, length)} for length in lengths)


def test_no_piece_has_more_samples_than_float32_sums_bear():
    assert [len(piece.group) for piece in Partition.of([torch.zeros(5000)]).pieces] == [MOST_TOGETHER, 904]


@pytest.mark.filterwarnings("ignore:samples are computed one at a time")
@given(lengths=st.lists(st.integers(0, 9), max_size=40), budget=st.integers(1, 40))
def test_pieces_are_as_many_records_as_the_budget_allows(lengths, budget):
    """Every record once; tokens within the budget, or one record; no more pieces than that needs."""
    of_record = token_budget(lambda record: record["input_ids"].shape[1], budget)
    found = [piece.group for piece in Partition.of(of_lengths(lengths), of_record).pieces]
    assert sorted(row for piece in found for row in piece.rows.tolist()) == list(range(len(lengths)))
    assert all(len(piece) == 1 or len(piece) * piece.tensors[0].shape[2] <= budget for piece in found)
    most = {length: max(1, budget // max(1, length)) for length in lengths}
    assert len(found) == sum(-(-lengths.count(length) // most[length]) for length in set(lengths))


def test_a_size_or_a_function_that_returns_none_is_refused():
    optimizer = by_hand(max_physical_batch_size=3)
    for size in (0, lambda record: 0):
        optimizer.max_physical_batch_size = size  # set between steps
        with refused(optimizer, "max_physical_batch_size, or its value, must be an integer of at least 1, got 0"):
            steps(optimizer, [3])


def test_a_function_that_writes_into_its_record_gets_a_copy():
    """Else it would write into the first record, and which that is depends on others: it moved a sum by 1.3 clips."""
    (piece,) = Partition.of(of_lengths([2, 2]), lambda record: int(record["input_ids"].add_(2).max())).pieces
    assert not piece.group.tensors[0].any()


@pytest.mark.parametrize("preset", PRESETS.values())
def test_a_run_in_pieces_is_the_run_in_one_piece(preset, unbound_noise):
    """Weights, learning rates and the raw values; an empty batch too."""
    runs = []
    for size in (None, 3, lambda record: len(record[0]) + 1):
        settings = {"preset": preset, "target_epsilon": 3.0, "diagnostics": True}
        optimizer = by_hand(max_physical_batch_size=size, **settings)
        records = steps(optimizer, [8, 5, 0, 9])
        told = ([getattr(record, key) for record in records] for key in ("eta", "diagnostics"))
        runs.append((flat(optimizer.module), *told))
    for run in runs[1:]:
        for whole, in_pieces in zip(runs[0], run, strict=True):
            torch.testing.assert_close(whole, in_pieces, rtol=1e-9, atol=1e-12, equal_nan=True)
