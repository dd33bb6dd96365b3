"""Texts to learn from: meaning representations with their references, and documents; none is downloaded here."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyfreedp.experiments.data.grammar import Pair, instances, pairs
from hyfreedp.experiments.data.splits import held_out_from, shuffled_by_group

RESTAURANTS_TRAIN, RESTAURANTS_TEST = 6000, 100  # pairs; instances with several references each
E2E_TRAIN, E2E_TEST = 42_061, 630
E2E_VALIDATION_START = 33_651
# Of the official CSV files, which the packed copies are gzipped from.
E2E_CHECKSUMS = {
    "trainset.csv": "f27d48df45815288ab15619d47a79028c300fbb7f42e373668aba0b98c1d57c6",
    "testset_w_refs.csv": "edc8db685e39bb9824d5bd70c18b1c9b0412d14b527aa960e2d1c8251ee15ccd",
}
_E2E_FOLDERS = ("e2e", "e2e-dataset")
_TEST_REFERENCES = 4
_TRAIN_SEED, _TEST_SEED = 0, 1
_FIELDS = ("text", "abstract")  # of a document in a table, the first that is there
_NAME = "name:"


@dataclass(frozen=True)
class TableToText:
    """A table-to-text data set.

    Attributes:
        train: pairs, those of one MR beside each other.
        validation_start: training pairs from here on are held out when settings are chosen; no MR is on both sides.
        test: MRs, each with all its references.
        source: where they come from, for the record of a run.
    """

    train: list[Pair]
    validation_start: int
    test: list[tuple[str, list[str]]]
    source: str


def restaurants(train_size: int = RESTAURANTS_TRAIN, test_size: int = RESTAURANTS_TEST) -> TableToText:
    """Synthetic: the private domain of ``data.grammar``, without a test MR in the training part."""
    test = instances("private", test_size, _TEST_SEED, _TEST_REFERENCES)
    train = pairs("private", train_size, _TRAIN_SEED, excluded=frozenset(meaning for meaning, _ in test))
    return _table_to_text(train, test, "synthetic: restaurants of a grammar")


def e2e() -> TableToText:
    """The data set of the E2E challenge (Novikova, Dusek and Rieser 2017), CC BY-SA 4.0, as it was released.

    Raises:
        FileNotFoundError: it is not in ``$HYFREEDP_DATA``, with what to do.
        ValueError: a file is damaged or another one.
    """
    train = [Pair(meaning, reference) for meaning, reference in _e2e_rows("trainset.csv")]
    test: dict[str, list[str]] = {}
    for meaning, reference in _e2e_rows("testset_w_refs.csv"):
        test.setdefault(meaning, []).append(reference)
    found = _table_to_text(train, list(test.items()), "E2E NLG challenge, official release")
    sizes = len(found.train), found.validation_start, len(found.test)
    if sizes != (E2E_TRAIN, E2E_VALIDATION_START, E2E_TEST):
        expected = (E2E_TRAIN, E2E_VALIDATION_START, E2E_TEST)
        raise ValueError(f"E2E must have {expected} training pairs, pairs before validation, test MRs; got {sizes}")
    return found


def _table_to_text(train: list[Pair], test: list[tuple[str, list[str]]], source: str) -> TableToText:
    _, groups = np.unique([pair.meaning for pair in train], return_inverse=True)
    order = shuffled_by_group(groups)
    return TableToText([train[index] for index in order], held_out_from(groups[order]), test, source)


def _e2e_rows(name: str) -> list[list[str]]:
    """Meaning representation and reference of every row of an official file."""
    path = _e2e_file(name)
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    if (found := hashlib.sha256(content).hexdigest()) != E2E_CHECKSUMS[name]:
        raise ValueError(
            f"{path} is damaged or another file: the SHA-256 of {name} is {found}, not {E2E_CHECKSUMS[name]}"
        )
    _, *rows = csv.reader(io.StringIO(content.decode(), newline=""))
    return rows


def _e2e_file(name: str) -> Path:
    variable = os.environ.get("HYFREEDP_DATA")
    if variable and not Path(variable).is_dir():
        raise FileNotFoundError(f"HYFREEDP_DATA must name a folder of data sets, got {variable!r}")
    if variable:
        for path in (Path(variable) / folder / f"{name}{suffix}" for folder in _E2E_FOLDERS for suffix in (".gz", "")):
            if path.exists():
                return path
    where = f"in HYFREEDP_DATA={variable}" if variable else "on this machine (HYFREEDP_DATA is not set)"
    raise FileNotFoundError(
        f"The E2E data set's {name} is not {where}: set HYFREEDP_DATA to a folder with "
        f"{' and '.join(E2E_CHECKSUMS)} of its official release, gzipped or not, in {' or '.join(_E2E_FOLDERS)}"
    )


def documents_from(source: str) -> list[str]:
    """The documents of a local file or of the ``datasets`` package, blank ones left out.

    Args:
        source: a file ``.txt`` (documents separated by blank lines), ``.jsonl`` (an object with the key "text" or
            "abstract" on each line) or ``.parquet`` (a column "text" or "abstract"; needs pyarrow); or else the name of
            a data set for ``datasets.load_dataset``, whose part "train" is read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read or has no document, in one sentence.
    """
    path = _local(source)
    if path is None:
        found = _from_datasets(source)
    elif path.stat().st_size == 0:
        raise ValueError(f"{source} is empty: it must hold documents")
    else:
        found = list(_READERS[path.suffix](path))
    if wrong := [number for number, text in enumerate(found, start=1) if not isinstance(text, str)]:
        raise ValueError(f"every document of {source} must be a text, number {wrong[0]} is {found[wrong[0] - 1]!r}")
    if not (documents := [text.strip() for text in found if text.strip()]):
        raise ValueError(f"{source} has no document: every text in it is blank")
    return documents


def checksum_of(source: str) -> str:
    """What ``source`` of :func:`documents_from` holds: the SHA-256 of a file's content; of a name, the name itself."""
    path = _local(source)
    if path is None:
        return _NAME + source
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _local(source: str) -> Path | None:
    """The file that is meant, or None for a name of ``datasets``."""
    path = Path(source)
    if path.is_dir():
        raise ValueError(f"{source} is a folder: name a file of it ({', '.join(_READERS)})")
    if path.suffix in _READERS:
        if not path.exists():
            raise FileNotFoundError(f"{source} does not exist: it must be a file of documents")
        return path
    if path.exists():
        raise ValueError(f"{source} must end in {', '.join(_READERS)} to be read as documents")
    return None


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8, byte {error.start} is not") from error


def _from_txt(path: Path) -> Iterable[str]:
    """Lines of one document are joined by spaces."""
    blocks = re.split(r"\n\s*\n", _content(path))
    return [" ".join(line.strip() for line in block.splitlines()) for block in blocks]


def _from_jsonl(path: Path) -> Iterable[str]:
    for number, line in enumerate(_content(path).split("\n"), start=1):  # a JSON string may have other line ends
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {path} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f'line {number} of {path} must be an object with the key "text" or "abstract"')
        yield record[_field(list(record), f"line {number} of {path}")]


def _from_parquet(path: Path) -> Iterable[str]:
    import pandas as pd

    try:
        table = pd.read_parquet(path)
    except ImportError as error:
        raise ValueError(f"to read {path} the package pyarrow is needed: pip install pyarrow") from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error
    return table[_field(list(table.columns), str(path))].tolist()


def _from_datasets(name: str) -> list[str]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{name!r} is no file ({', '.join(_READERS)}), and to read it as a name the package datasets is needed: "
            "pip install datasets"
        ) from error
    try:
        table = datasets.load_dataset(name, split="train")
    except (OSError, ValueError) as error:
        raise ValueError(f"the package datasets cannot load {name!r}: {error}") from error
    return list(table[_field(table.column_names, repr(name))])


def _field(names: list[str], where: str) -> str:
    for field in _FIELDS:
        if field in names:
            return field
    raise ValueError(f'{where} must have "text" or "abstract", it has {", ".join(map(repr, names)) or "nothing"}')


_READERS: dict[str, Callable[[Path], Iterable[str]]] = {
    ".txt": _from_txt,
    ".jsonl": _from_jsonl,
    ".parquet": _from_parquet,
}
