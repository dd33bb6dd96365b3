"""Few cases: some combinations instead of all, since a fault seldom needs more than two values."""

import itertools
from collections.abc import Collection

import pytest


def each(**values: Collection) -> pytest.MarkDecorator:
    """Every value of every parameter at least once: as many cases as the longest list has values."""
    lists = [list(given) for given in values.values()]
    longest = max(map(len, lists))
    rows = [tuple(given[i % len(given)] for given in lists) for i in range(longest)]
    return pytest.mark.parametrize(tuple(values), rows)


def pairs(**values: Collection) -> pytest.MarkDecorator:
    """Every two values of two parameters meet at least once: greedily chosen from the product of three or more."""
    lists = [list(given) for given in values.values()]
    rows = list(itertools.product(*(range(len(given)) for given in lists)))
    met = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    left, chosen = set().union(*met.values()), []
    while left:
        chosen.append(max(rows, key=lambda row: len(met[row] & left)))
        left -= met[chosen[-1]]
    cases = [tuple(given[i] for given, i in zip(lists, row, strict=True)) for row in chosen]
    return pytest.mark.parametrize(tuple(values), cases)
