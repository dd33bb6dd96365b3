"""The few combinations that stand for all of them."""

import itertools

import pytest
from cases import each, pairs

VALUES = {"a": "xyz", "b": range(4), "c": (False, True), "d": (0.0, 1.0)}


@pytest.mark.parametrize(("choose", "size", "most"), [(each, 1, 4), (pairs, 2, 16)])
def test_every_value_and_every_pair_occurs(choose, size, most):
    names, rows = choose(**VALUES).args
    lists = [list(given) for given in VALUES.values()]
    found = {combination for row in rows for combination in itertools.combinations(enumerate(row), size)}
    wanted = (itertools.combinations(enumerate(row), size) for row in itertools.product(*lists))
    assert names == tuple(VALUES) and found == set().union(*wanted) and len(rows) <= most
