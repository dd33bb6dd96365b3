"""Synthetic sentences about places: a small grammar in the form of the E2E challenge (Novikova, Dusek, Rieser 2017).

A meaning representation (MR) lists slots and values, ``name[The Green Lantern], eatType[pub], food[Thai]``, and a
reference says all of it in one or two sentences. There are two domains of the same kind: *public* (hotels, museums and
shops) and *private* (restaurants). They share prices, areas and landmarks; food, customers and families are in the
private domain alone, style, visitors and dogs in the public one alone. Nothing in it is real.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal

from hyfreedp.experiments.data.lexicon import DOMAINS, FINDINGS, FRAMES, FRAMES_WITH_PLACE, PLACES

Domain = Literal["public", "private"]
LONGEST_SENTENCE = 25  # words
DOCUMENT_WORDS = range(40, 71)
REFERENCES = 3  # different references to one meaning among the pairs
_SLOTS_AT_LEAST, _ADJECTIVES_AT_MOST = 3, 2
_TRIES = 200  # draws in a row that find nothing new, after which a domain counts as exhausted


@dataclass(frozen=True)
class Pair:
    """A meaning representation and one text that says it."""

    meaning: str
    reference: str


def pairs(domain: Domain, count: int, seed: int, *, excluded: frozenset[str] = frozenset()) -> list[Pair]:
    """Synthetic pairs in random order; each MR has up to ``REFERENCES`` of them, all different.

    Args:
        domain: "public" or "private".
        count: number of pairs.
        excluded: MRs that may not occur, such as those of a test set.

    Raises:
        ValueError: the domain has too few MRs.
    """
    found = instances(domain, -(-count // REFERENCES), seed, REFERENCES, excluded=excluded)
    flat = [Pair(meaning, reference) for meaning, references in found for reference in references][:count]
    _generator("order", domain, seed).shuffle(flat)
    return flat


def instances(
    domain: Domain, count: int, seed: int, references: int, *, excluded: frozenset[str] = frozenset()
) -> list[tuple[str, list[str]]]:
    """Distinct MRs, none of ``excluded``, each with ``references`` distinct texts.

    Raises:
        ValueError: the domain has too few MRs, or an MR has too few texts.
    """
    generator = _generator("instances", domain, seed)
    found: dict[str, list[str]] = {}
    tries = 0
    while len(found) < count:
        slots = _slots(domain, generator)
        meaning = _meaning(slots)
        if meaning in found or meaning in excluded:
            tries += 1
            if tries == _TRIES:
                raise ValueError(f"count must be at most what the {domain} domain has, {len(found)} or so, got {count}")
            continue
        tries = 0
        found[meaning] = _texts(domain, slots, references, generator)
    return list(found.items())


def documents(domain: Domain, count: int, seed: int) -> list[str]:
    """Synthetic reports about places, in the way of an abstract: aim, facts, finding and perhaps a conclusion.

    Each has two to four sentences and a number of words in ``DOCUMENT_WORDS``.
    """
    generator = _generator("documents", domain, seed)
    return [_document(domain, generator) for _ in range(count)]


def _generator(purpose: str, domain: Domain, seed: int) -> Random:
    """Independent streams; text seeds are hashed by SHA-512, the same everywhere."""
    if domain not in DOMAINS:
        raise ValueError(f"domain must be one of {', '.join(DOMAINS)}, got {domain!r}")
    return Random(f"{purpose}/{domain}/{seed}")


def _slots(domain: Domain, generator: Random) -> dict[str, str]:
    """Random slots and their values, name and type among them, in the domain's order."""
    known = DOMAINS[domain]
    chosen = {"name": generator.choice(known.names), known.type_slot: generator.choice(known.types)}
    attributes = list(known.attributes)
    kept = generator.sample(attributes, generator.randint(_SLOTS_AT_LEAST - len(chosen), len(attributes)))
    return chosen | {slot: generator.choice(list(known.attributes[slot])) for slot in attributes if slot in kept}


def _meaning(slots: Mapping[str, str]) -> str:
    return ", ".join(f"{slot}[{value}]" for slot, value in slots.items())


def _texts(domain: Domain, slots: Mapping[str, str], count: int, generator: Random) -> list[str]:
    """Distinct texts for one MR."""
    texts: dict[str, None] = {}  # a set that keeps its order
    for _ in range(_TRIES * count):
        texts[_text(domain, slots, generator)] = None
        if len(texts) == count:
            return list(texts)
    raise ValueError(f"references must be at most what {_meaning(slots)} has ({len(texts)}), got {count}")


def _text(domain: Domain, slots: Mapping[str, str], generator: Random) -> str:
    """One or two sentences, drawn again while one of them is too long."""
    while True:
        sentences = _sentences(domain, slots, generator)
        if all(len(sentence.split()) <= LONGEST_SENTENCE for sentence in sentences):
            return " ".join(sentences)


def _sentences(domain: Domain, slots: Mapping[str, str], generator: Random) -> list[str]:
    """Each attribute is said before the noun, after it, as a place, or in a clause; the clauses left over follow."""
    known = DOMAINS[domain]
    places = [generator.choice(PLACES[slot][slots[slot]].phrases) for slot in PLACES if slot in slots]
    generator.shuffle(places)
    adjectives: list[str] = []
    clauses: list[str] = []
    phrase = ""
    # The nearer to the noun the later, "a cheap Greek pub": so the private domain's food, which is first, is put last.
    attributes = [slot for slot in known.attributes if slot in slots and slot not in PLACES]
    for slot in sorted(attributes, key=lambda slot: slot == "food"):
        forms = known.attributes[slot][slots[slot]]
        role = generator.choice(("adjective", "clause", "phrase"))
        if role == "adjective" and forms.adjectives and len(adjectives) < _ADJECTIVES_AT_MOST:
            adjectives.append(generator.choice(forms.adjectives))
        elif role == "phrase" and forms.phrases and not phrase:
            phrase = f" {generator.choice(forms.phrases)}"
        else:
            clauses.append(generator.choice(forms.clauses))
    generator.shuffle(clauses)
    kind = slots[known.type_slot]
    words = " ".join([*adjectives, kind])
    place = "".join(f" {part}" for part in places)
    frame = generator.choice(FRAMES + (FRAMES_WITH_PLACE if places else ()))
    first = frame.format(
        name=slots["name"],
        thing=f"{'an' if words[0].lower() in 'aeiou' else 'a'} {words}{phrase}",
        place=place,
        Place=_capitalised(place.strip()),
        clause=clauses.pop() if "{clause}" in frame and clauses else "",
    )
    first = first.replace(" and .", ".")  # a frame that wanted a clause where none is left
    if not clauses:
        return [first]
    *start, last = clauses
    subject = generator.choice(("It", "It", f"The {kind}", f"This {kind}"))
    return [first, f"{subject} {', '.join(start)}{' and ' if start else ''}{last}."]


def _document(domain: Domain, generator: Random) -> str:
    """Drawn again while it has too few or too many words."""
    known = DOMAINS[domain]
    while True:
        slots = _slots(domain, generator)
        facts = _text(domain, slots, generator)
        one, other = generator.sample(known.praised, 2)
        most, few = generator.choice(("most", "half", "many")), generator.choice(("a few", "some", "a third"))
        words = {
            "name": slots["name"],
            "type": slots[known.type_slot],
            "number": str(generator.randrange(20, 100, 10)),
            "day": generator.choice(("Friday", "Saturday", "Sunday", "Monday")),
            "month": generator.choice(("March", "May", "June", "August", "October", "December")),
            "one": one,
            "other": other,
            "most": most,
            "Most": _capitalised(most),
            "few": few,
        }
        parts = [generator.choice(known.aims), facts, generator.choice(FINDINGS)]
        if facts.count(".") == 1:
            parts.append(generator.choice(known.verdicts))
        text = " ".join(part.format(**words) for part in parts)
        if len(text.split()) in DOCUMENT_WORDS:
            return text


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
