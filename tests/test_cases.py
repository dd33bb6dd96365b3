"""The few combinations that stand for all of them, and one test of a list."""

import inspect
import itertools

import pytest
from cases import each, pairs, together

VALUES = {"a": "xyz", "b": range(4), "c": (False, True), "d": (0.0, 1.0)}


@pytest.mark.parametrize(("choose", "together", "most"), [(each, 1, 4), (pairs, 2, 16)])
def test_every_value_and_every_pair_occurs(choose, together, most):
    names, rows = choose(**VALUES).args
    lists = [list(given) for given in VALUES.values()]
    found = {combination for row in rows for combination in itertools.combinations(enumerate(row), together)}
    wanted = (itertools.combinations(enumerate(row), together) for row in itertools.product(*lists))
    assert names == tuple(VALUES) and found == set().union(*wanted) and len(rows) <= most


def test_all_failures_of_a_list_are_told():
    @together(("x", "y"), [(1, 1), (1, 2), (2, 2), (3, "z")])
    def equal(x, y, fixture):
        assert fixture == "fixture"
        assert x == y, "differ"
        if x == 2:
            pytest.fail("by name")

    assert list(inspect.signature(equal).parameters) == ["fixture"]
    with pytest.raises(AssertionError) as caught:
        equal(fixture="fixture")
    told = "\n".join(caught.value.__notes__)
    assert "(1, 2): AssertionError: differ" in told and "(2, 2): Failed: by name" in told and "(3, 'z'): " in told
    assert "(1, 1)" not in told
    with pytest.raises(AssertionError):
        together("x", [])(lambda x: None)()
