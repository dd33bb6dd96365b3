"""The synthetic sentences: every slot is said, in English, without repetition, the same for the same seed."""

import re
from collections import Counter, defaultdict

import pytest

from hyfreedp.experiments.data.grammar import LONGEST_SENTENCE, REFERENCES, documents, pairs

DOMAINS = ("public", "private")
SLOT = re.compile(r"([\w ]+)\[([^\]]+)\]")
# What a reader accepts as saying a value, written down again independently of the grammar; else the value itself.
SAID = {
    "cheap": r"cheap|low-priced|low prices",
    "moderate": r"moderately priced|mid-priced|moderate prices",
    "city centre": r"city centre|centre of the city",
    "riverside": r"by the river\b|riverside",
    "old town": r"old town|old part of the city",
}
SAID_OF = {
    ("priceRange", "high"): r"expensive|high-priced|high prices",
    ("rating", "low"): r"poorly rated|low (visitor|customer) rating",
    ("rating", "average"): r"average (visitor|customer) rating",
    ("rating", "high"): r"highly rated|high (visitor|customer) rating",
    ("petFriendly", "yes"): r"(?<!not )(pet-friendly|good for dogs)|welcomes dogs|with room for dogs",
    ("petFriendly", "no"): r"not (pet-friendly|good for dogs|welcome dogs)|without room for dogs",
    ("familyFriendly", "yes"): (
        r"(?<!not )(family-friendly|good for families)|child-friendly|welcomes children|for the whole family"
    ),
    ("familyFriendly", "no"): r"not (family-friendly|good for families|welcome children)|adults-only|for adults only",
}


def slots_of(meaning):
    return dict(SLOT.findall(meaning.replace(", ", "\n")))


def said(slot, value):
    slot = "rating" if slot.endswith("rating") else slot
    if slot == "near":
        return rf"\b(near|close to|not far from) {value}\b"
    return SAID_OF.get((slot, value)) or SAID.get(value) or re.escape(value)


def sentences(text):
    return re.findall(r"[^.]+\.", text)


def words(texts):
    return {word for text in texts for word in re.findall(r"[\w'-]+", text)}


@pytest.fixture(scope="module", params=DOMAINS)
def sample(request):
    return pairs(request.param, 6000, seed=0)


def test_every_slot_of_a_meaning_is_said_and_no_other_value_of_it(sample):
    values = defaultdict(set)
    for pair in sample:
        for slot, value in slots_of(pair.meaning).items():
            values[slot].add(value)
    assert len(values) == 8
    for pair in sample:
        slots = slots_of(pair.meaning)
        rest = pair.reference.replace(slots["name"], "", 1)  # "The Old Mill" may be near "Mill House"
        assert rest != pair.reference
        for slot in values.keys() - {"name"}:
            for value in values[slot]:
                found = re.search(said(slot, value), rest, re.IGNORECASE) is not None
                assert found == (slots.get(slot) == value), (pair, slot, value)


def test_sentences_are_short_and_english(sample):
    for pair in sample:
        parts = sentences(pair.reference)
        assert len(parts) in (1, 2) and "".join(parts) == pair.reference
        for part in parts:
            assert part.strip()[0].isupper() and len(part.split()) <= LONGEST_SENTENCE
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", pair.reference, re.IGNORECASE)
        assert not re.search(r"  |[{}]| [.,]|and \.|,,|\b(\w+) \1\b", pair.reference)


def test_a_meaning_has_several_references_all_different(sample):
    assert len(set(sample)) == len(sample)
    assert set(Counter(pair.meaning for pair in sample).values()) == {REFERENCES}
    lengths = Counter(len(slots_of(pair.meaning)) for pair in sample)
    assert set(lengths) == {3, 4, 5, 6, 7, 8}


def test_golden():
    """The streams of random numbers are the same on every machine, whatever the hash seed."""
    (pair,) = pairs("private", 1, seed=0)
    assert pair.meaning == (
        "name[The Red Kitchen], eatType[bistro], food[Italian], priceRange[cheap], customer rating[high], "
        "area[riverside], familyFriendly[no], near[The Old Mill]"
    )
    assert pair.reference == (
        "There is a highly rated bistro with low prices called The Red Kitchen in the riverside area close to "
        "The Old Mill. This bistro serves Italian food and does not welcome children."
    )
    (document,) = documents("private", 1, seed=0)
    assert document == (
        "In June, 80 guests had lunch at The Green Lantern and filled in a form about it. The Green Lantern, "
        "an expensive adults-only coffee shop serving Japanese food, is located in the centre of the city not "
        "far from The Silver Tower. It has a customer rating of 3 out of 5. Half of them liked the wine, but "
        "some were unhappy with the desserts."
    )
