"""The loop of a run ends where its plan does, by itself."""

import pytest
from torch.utils.data import DataLoader
from twins import cross_entropy, make_data, make_private

from hyfreedp import BudgetExhausted


def start(**settings):
    model, optimizer, loader = make_private(**{"preset": "fixed", **settings})
    return cross_entropy(model), optimizer, loader


@pytest.mark.parametrize(
    ("plan", "expected"),
    [({"steps": 3}, [3]), ({"steps": 10}, [5, 5]), ({"steps": 12}, [5, 5, 2]), ({"epochs": 2, "steps": None}, [5, 5])],
    ids=repr,
)
def test_the_last_pass_ends_with_the_plan(plan, expected):
    """By the loop of docs/usage.md: the steps of each pass over the loader."""
    (loss, optimizer, loader), made = start(**plan), []
    while optimizer.steps_left:
        made.append(0)
        for batch in loader:
            optimizer.step(loss, batch)
            made[-1] += 1
    assert made == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_too_many_names_the_loop_that_ends(workers, capfd):
    """An empty pass would let ``while True`` go round for ever."""
    loss, optimizer, loader = start(loader=DataLoader(make_data(), batch_size=8, num_workers=workers), steps=3)
    for batch in loader:
        optimizer.step(loss, batch)
    with pytest.raises(BudgetExhausted, match=r"all 3 planned steps .* \(while optimizer.steps_left: for batch in"):
        next(iter(loader))
    assert "ignored" not in capfd.readouterr().err
