"""Text data: pairs of a meaning representation and a reference text, and documents. Nothing is downloaded here."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import lzma
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyfreedp.experiments.data.datasets import held_out_from, shuffled_by_group
from hyfreedp.experiments.store.paths import given, looked_at, workspace

FOLDER = workspace().root / "data" / "texts"
E2E_TRAIN = 42_061
# SHA-256 of the official CSV files, before any gzip.
E2E_CHECKSUMS = {
    "trainset.csv": "f27d48df45815288ab15619d47a79028c300fbb7f42e373668aba0b98c1d57c6",
    "testset_w_refs.csv": "edc8db685e39bb9824d5bd70c18b1c9b0412d14b527aa960e2d1c8251ee15ccd",
}
_E2E_FOLDERS = ("e2e", "e2e-dataset")


@dataclass(frozen=True)
class Pair:
    """A meaning representation and one reference text, which expresses it."""

    meaning: str
    reference: str


@dataclass(frozen=True)
class Texts:
    """A data set of texts.

    Attributes:
        train: documents; or pairs, those of one meaning representation (MR) adjacent.
        test: documents; or tuples of an MR and all its references.
        validation_start: when settings are chosen, training records from this index on are held out, whole MRs each.
        source: where the texts come from, for the record of a run.
    """

    train: Sequence[Pair | str]
    test: Sequence[Any]
    validation_start: int
    source: str

    @property
    def documents(self) -> bool:
        """True for documents, False for pairs."""
        return isinstance(self.train[0], str)


def synthetic(name: str) -> Texts:
    """The committed "restaurants" (pairs) or "reports" (documents), which ``tools/weights/grammar.py`` made."""
    found = json.loads(lzma.decompress((FOLDER / f"{name}.json.xz").read_bytes()))
    train = [one if isinstance(one, str) else Pair(*one) for one in found["train"]]
    return Texts(**found | {"train": train})


def e2e() -> Texts:
    """The data set of the E2E challenge (Novikova, Dusek and Rieser 2017), CC BY-SA 4.0, as it was released.

    Raises:
        FileNotFoundError: it is not in ``$HYFREEDP_DATA``; says what to do.
        ValueError: a file has another checksum.
    """
    train = [Pair(meaning, reference) for meaning, reference in _e2e_rows("trainset.csv")]
    test: dict[str, list[str]] = {}
    for meaning, reference in _e2e_rows("testset_w_refs.csv"):
        test.setdefault(meaning, []).append(reference)
    return table_to_text(train, list(test.items()), "E2E NLG challenge, official release")


def table_to_text(train: list[Pair], test: list[tuple[str, list[str]]], source: str) -> Texts:
    """A data set with the pairs in a fixed random order, in which those of one meaning stay together."""
    _, groups = np.unique([pair.meaning for pair in train], return_inverse=True)
    order = shuffled_by_group(groups)
    return Texts([train[index] for index in order], test, held_out_from(groups[order]), source)


def _e2e_rows(name: str) -> list[list[str]]:
    """Meaning representation and reference of each row of an official file, which may be gzipped."""
    path = given(*(f"{folder}/{name}{suffix}" for folder in _E2E_FOLDERS for suffix in (".gz", "")))
    if path is None:
        raise FileNotFoundError(
            f"The E2E data set's {name} is not {looked_at()}: set HYFREEDP_DATA to a folder with "
            f"{' and '.join(E2E_CHECKSUMS)} of its official release, gzipped or not, in {' or '.join(_E2E_FOLDERS)}"
        )
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != E2E_CHECKSUMS[name]:
        raise ValueError(
            f"{path} is damaged or another file: the SHA-256 of {name} is {found}, not {E2E_CHECKSUMS[name]}"
        )
    return list(csv.reader(io.StringIO(content.decode(), newline="")))[1:]


def documents_from(source: str) -> list[str]:
    """The documents in a UTF-8 file, without blank ones.

    Args:
        source: a ``.txt`` file, whose documents are separated by blank lines (other line ends become spaces), or a
            ``.jsonl`` file, with an object on each line that has the key "text" or "abstract".

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has another format or no document.
    """
    path = Path(source)
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"{source} must end in .txt or .jsonl to be read as documents")
    content = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".txt":
        found = [" ".join(map(str.strip, block.splitlines())) for block in re.split(r"\n\s*\n", content)]
    else:
        lines = [line for line in content.split("\n") if line.strip()]  # not splitlines: JSON may contain U+2028
        try:
            records = map(json.loads, lines)
            found = [record["text" if "text" in record else "abstract"] for record in records]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'each line of {source} must be a JSON object with "text" or "abstract"') from error
    if not all(isinstance(text, str) for text in found):
        raise ValueError(f"every document of {source} must be a text")
    documents = [text.strip() for text in found if text.strip()]
    if not documents:
        raise ValueError(f"{source} has no document: it is empty, or every text in it is blank")
    return documents


def checksum_of(source: str) -> str:
    """The SHA-256 of a file's content."""
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()
