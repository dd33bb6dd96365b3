"""Few cases: some combinations instead of all, since a fault seldom needs more than two values; one test of a list."""

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import pytest
import torch


def each(**values: Collection) -> pytest.MarkDecorator:
    """Every value of every parameter at least once: as many cases as the longest list has values."""
    lists = [list(given) for given in values.values()]
    longest = max(map(len, lists))
    return _mark(values, [tuple(given[i % len(given)] for given in lists) for i in range(longest)])


def pairs(**values: Collection) -> pytest.MarkDecorator:
    """Every two values of two parameters meet at least once: greedily chosen from the product of three or more."""
    lists = [list(given) for given in values.values()]
    rows = list(itertools.product(*(range(len(given)) for given in lists)))
    met = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    left, chosen = set().union(*met.values()), []
    while left:
        chosen.append(max(rows, key=lambda row: len(met[row] & left)))
        left -= met[chosen[-1]]
    return _mark(values, [tuple(given[i] for given, i in zip(lists, row, strict=True)) for row in chosen])


def _mark(values: dict[str, Collection], rows: list[tuple]) -> pytest.MarkDecorator:
    ids = [" ".join(str(getattr(value, "__name__", value)) for value in row) for row in rows]
    return pytest.mark.parametrize(tuple(values), rows, ids=ids)


def together(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable], Callable]:
    """As ``pytest.mark.parametrize``, for what is quick and leaves nothing behind: one test, its error lists all.

    It stands next to the function, below other decorators. All rows have the same fixtures.
    """
    rows = list(rows)

    def of_all(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failures: list[tuple[Any, BaseException]] = []
            for row in rows:
                torch.manual_seed(0)
                np.random.seed(0)
                try:
                    test(**fixtures, **({names: row} if isinstance(names, str) else dict(zip(names, row, strict=True))))
                except (Exception, pytest.fail.Exception) as error:
                    failures.append((row, error))
            assert rows
            for _, first in failures[:1]:
                for row, error in failures:
                    first.add_note(f"{row}: {type(error).__name__}: {error}")
                raise first

        own = inspect.signature(test)
        given = {names} if isinstance(names, str) else set(names)
        run.__signature__ = own.replace(parameters=[p for name, p in own.parameters.items() if name not in given])
        return run

    return of_all
