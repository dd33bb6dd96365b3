"""Finished runs in one committed file: packed, and unpacked beside those of this machine.

The file is a compressed tar of the runs' records, ``<key>.json``, and steps, ``<key>.csv``. The same runs give the same
bytes. Nothing in it is executed, and no name leads out of the folder it is unpacked into.
"""

from __future__ import annotations

import io
import lzma
import os
import re
import tarfile
import uuid
from collections.abc import Container
from pathlib import Path

from hyfreedp.experiments.store.files import replacing
from hyfreedp.experiments.store.paths import workspace

NAME = "runs.tar.xz"  # in data/results/<profile>/
FRESH = "HYFREEDP_FRESH"  # set by a batch that trains all again
_FILE = re.compile(r"[0-9a-f]{16}\.(csv|json)")


def pack(cells: Path, path: Path, keys: Container[str] | None = None) -> int:
    """Write the finished runs of a folder to ``path``, those with these keys or all; their number. No file if none."""
    records = sorted(file for file in cells.glob("*.json") if _FILE.fullmatch(file.name))
    records = [record for record in records if keys is None or record.stem in keys]
    if not records:
        return 0
    with replacing(path) as temporary:
        with tarfile.open(temporary, "w:xz", preset=9) as archive:
            for record in records:
                for file in (record.with_suffix(".csv"), record):  # a record says that its run is finished
                    content = file.read_bytes()
                    member = tarfile.TarInfo(file.name)  # of no time and no user
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return len(records)


def read(path: Path) -> dict[str, bytes]:
    """The files of an archive by name; none if it does not exist. A damaged or foreign one is a ValueError."""
    found: dict[str, bytes] = {}
    if not path.exists():
        return found
    try:
        whole = io.BytesIO(lzma.decompress(path.read_bytes()))  # to the checksum, which no reader of tars reaches
    except lzma.LZMAError as error:
        raise ValueError(f"{path} is damaged ({error}): get it again, as by git checkout") from error
    with tarfile.open(fileobj=whole) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is None or not _FILE.fullmatch(member.name):
                raise ValueError(f"{path} must hold runs only, named <16 hex digits>.json or .csv, not {member.name!r}")
            found[member.name] = content.read()
    return found


def unpack(files: dict[str, bytes], cells: Path) -> None:
    """Write the runs of :func:`read` that the folder lacks: what was trained on this machine stays.

    A run without its record, say since it was killed before, gets the steps of the committed one too.
    """
    cells.mkdir(parents=True, exist_ok=True)
    # Empty after a power cut: none of two thousand is synced.
    there = {name for name in files if (cells / name).exists() and (cells / name).stat().st_size}
    for name, content in files.items():
        key = Path(name).stem
        if name not in there or f"{key}.json" not in there:
            temporary = cells / f".{key}-{uuid.uuid4().hex}"
            temporary.write_bytes(content)
            os.replace(temporary, cells / name)


def unpack_committed(profile: str) -> None:
    """Unpack the committed runs of a profile beside this machine's: a notebook opened alone trains nothing known.

    Does nothing in a batch that trains all again.
    """
    here = workspace()
    if FRESH not in os.environ:
        unpack(read(here.results / profile / NAME), here.cells)
