"""Synthetic sentences about places: a small grammar in the form of the E2E challenge (Novikova, Dusek, Rieser 2017).

A meaning representation (MR) lists slots and values, as ``name[The Green Lantern], eatType[pub], food[Thai]``, and a
reference text expresses all of it in one or two sentences. There are two similar domains: *public* (hotels, museums and
shops) and *private* (restaurants). Both have prices, areas and landmarks; only the private one has food, customers and
families, only the public one style, visitors and dogs. Nothing is real.

Our public weights and tokenizer are trained on the public domain. ``python tools/weights/grammar.py`` writes texts of
the private one, for two small tasks, to ``data/texts/``, and the tokenizer.
"""

from __future__ import annotations

import json
import lzma
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, astuple
from pathlib import Path
from random import Random
from typing import Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hyfreedp.experiments.data.encoding import BOS, COMMITTED, EOS, PAD, SEP, wrapped
from hyfreedp.experiments.data.texts import FOLDER, Pair, Texts, table_to_text
from hyfreedp.experiments.store.files import replacing, write_text
from hyfreedp.experiments.store.paths import workspace

Domain = Literal["public", "private"]
WORDS = tomllib.loads(Path(__file__).with_name("grammar.toml").read_text(encoding="utf-8"))
LONGEST_SENTENCE = 25  # words
DOCUMENT_WORDS = range(40, 71)
REFERENCES = 3  # different references of an MR, in pairs
_SLOTS_AT_LEAST, _ADJECTIVES_AT_MOST = 3, 2


def pairs(domain: Domain, count: int, seed: int, *, excluded: frozenset[str] = frozenset()) -> list[Pair]:
    """Synthetic pairs in random order; each MR has up to ``REFERENCES`` of them, all different.

    Args:
        count: number of pairs; it must need far fewer MRs than the domain has.
        excluded: MRs to avoid, such as those of a test set.
    """
    found = instances(domain, -(-count // REFERENCES), seed, REFERENCES, excluded=excluded)
    flat = [Pair(meaning, reference) for meaning, references in found for reference in references][:count]
    _generator("order", domain, seed).shuffle(flat)
    return flat


def instances(
    domain: Domain, count: int, seed: int, references: int, *, excluded: frozenset[str] = frozenset()
) -> list[tuple[str, list[str]]]:
    """``count`` distinct MRs, none in ``excluded``, each with ``references`` distinct texts."""
    generator = _generator("instances", domain, seed)
    found: dict[str, list[str]] = {}
    while len(found) < count:
        slots = _slots(domain, generator)
        meaning = ", ".join(f"{slot}[{value}]" for slot, value in slots.items())
        if meaning not in found and meaning not in excluded:
            texts: dict[str, None] = {}  # a set that keeps its order
            while len(texts) < references:
                texts[_text(domain, slots, generator)] = None
            found[meaning] = list(texts)
    return list(found.items())


def documents(domain: Domain, count: int, seed: int) -> list[str]:
    """Synthetic reports about places, like abstracts: aim, facts, finding and perhaps a conclusion.

    Each has two to four sentences, and a number of words in ``DOCUMENT_WORDS``.
    """
    generator = _generator("documents", domain, seed)
    return [_document(domain, generator) for _ in range(count)]


def _generator(purpose: str, domain: Domain, seed: int) -> Random:
    """A generator for this purpose, seeded by a text, which Python hashes by SHA-512 on every machine."""
    return Random(f"{purpose}/{domain}/{seed}")


def _slots(domain: Domain, generator: Random) -> dict[str, str]:
    """Random slots and values, always with name and type, in the domain's order."""
    known = WORDS[domain]
    chosen = {"name": generator.choice(known["names"]), known["type_slot"]: generator.choice(known["types"])}
    attributes = list(known["slots"])
    kept = generator.sample(attributes, generator.randint(_SLOTS_AT_LEAST - len(chosen), len(attributes)))
    return chosen | {slot: generator.choice(list(known["slots"][slot])) for slot in attributes if slot in kept}


def _text(domain: Domain, slots: Mapping[str, str], generator: Random) -> str:
    """One or two sentences; drawn again until none is too long."""
    while True:
        sentences = _sentences(domain, slots, generator)
        if all(len(sentence.split()) <= LONGEST_SENTENCE for sentence in sentences):
            return " ".join(sentences)


def _sentences(domain: Domain, slots: Mapping[str, str], generator: Random) -> list[str]:
    """Sentences that put each attribute before the noun, after it, into a place or a clause; other clauses follow."""
    known = WORDS[domain]
    forms = {slot: known["slots"][slot][slots[slot]] for slot in known["slots"] if slot in slots}
    places = [generator.choice(forms.pop(slot)[2]) for slot in ("area", "near") if slot in slots]
    generator.shuffle(places)
    adjectives: list[str] = []
    clauses: list[str] = []
    phrase = ""
    # Food (in the private domain first) comes last, so that it stands next to the noun: "a cheap Greek pub".
    for slot in sorted(forms, key=lambda slot: slot == "food"):
        before, after, behind = forms[slot]
        role = generator.choice(("adjective", "clause", "phrase"))
        if role == "adjective" and before and len(adjectives) < _ADJECTIVES_AT_MOST:
            adjectives.append(generator.choice(before))
        elif role == "phrase" and behind and not phrase:
            phrase = f" {generator.choice(behind)}"
        else:
            clauses.append(generator.choice(after))
    generator.shuffle(clauses)
    kind = slots[known["type_slot"]]
    words = " ".join([*adjectives, kind])
    place = "".join(f" {part}" for part in places)
    frame = generator.choice(WORDS["frames"] + (WORDS["frames_with_place"] if places else []))
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
    known = WORDS[domain]
    while True:
        slots = _slots(domain, generator)
        facts = _text(domain, slots, generator)
        one, other = generator.sample(known["praised"], 2)
        words = {"name": slots["name"], "type": slots[known["type_slot"]], "one": one, "other": other}
        words |= {blank: generator.choice(fillings) for blank, fillings in WORDS["blanks"].items()}
        words["Most"] = _capitalised(words["most"])
        parts = [generator.choice(known["aims"]), facts, generator.choice(WORDS["findings"])]
        if facts.count(".") == 1:
            parts.append(generator.choice(known["verdicts"]))
        text = " ".join(part.format(**words) for part in parts)
        if len(text.split()) in DOCUMENT_WORDS:
            return text


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def restaurants() -> Texts:
    """Pairs about restaurants; no MR is in both parts."""
    test = instances("private", 100, seed=1, references=4)
    train = pairs("private", 6000, seed=0, excluded=frozenset(meaning for meaning, _ in test))
    return table_to_text(train, test, "synthetic: restaurants of a grammar")


def reports() -> Texts:
    """Short reports about restaurants, of which 6,000 train."""
    found = documents("private", 6200, seed=3)
    return Texts(found[:6000], found[6000:], 4800, "synthetic: reports of a grammar")


def public_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019), which encodes any text.

    Its 600 tokens are four special ones, 256 bytes, and merges. It is trained on public text only: a vocabulary from
    private text would reveal that text.
    """
    texts = [text for pair in pairs("public", 6000, seed=0) for text in (pair.meaning, pair.reference)]
    texts += documents("public", 1000, seed=0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[PAD, BOS, EOS, SEP], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return wrapped(tokenizer)


def main() -> None:
    for texts in (restaurants(), reports()):
        train = [astuple(one) if isinstance(one, Pair) else one for one in texts.train]
        name = "reports" if texts.documents else "restaurants"
        with replacing(FOLDER / f"{name}.json.xz") as temporary:
            temporary.write_bytes(lzma.compress(json.dumps(asdict(texts) | {"train": train}).encode()))
    described = public_tokenizer().backend_tokenizer.to_str(pretty=True)
    write_text(workspace().checkpoints / COMMITTED, described + "\n")


if __name__ == "__main__":
    main()
