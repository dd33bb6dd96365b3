"""The synthetic sentences, of which public weights and records were made, are the same on every machine."""

import hashlib
import json
from dataclasses import astuple

import pytest
from grammar import documents, instances, pairs, reports, restaurants

from hyfreedp.experiments.data.texts import synthetic


@pytest.mark.parametrize(
    ("domain", "expected"),
    [
        ("public", ("a00c63c084425c35", "552196ee491b206f", "15033f26646a2608")),
        ("private", ("9ac01983cdb87482", "da0e37f31c694770", "a91d77c57d4be995")),
    ],
)
def test_texts_are_those_that_were_trained_on(domain, expected):
    """Pairs, instances with several references, and documents, by the SHA-256 of their JSON; whatever the hash seed."""
    made = [
        list(map(astuple, pairs(domain, 600, seed=0))),
        instances(domain, 100, 1, 4),
        documents(domain, 200, seed=0),
    ]
    assert tuple(hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16] for texts in made) == expected


def test_the_committed_texts_are_what_the_grammar_makes():
    for name, made in (("restaurants", restaurants()), ("reports", reports())):
        stored = synthetic(name)
        assert stored.train == made.train and [*map(list, stored.test)] == [*map(list, made.test)], name
        assert (stored.validation_start, stored.source) == (made.validation_start, made.source)
