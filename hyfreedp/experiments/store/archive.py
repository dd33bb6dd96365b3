"""Finished runs in one committed file: packing it, and unpacking it into the folder of this machine's runs.

The file is a compressed tar of each run's record, ``<key>.json``, and steps, ``<key>.csv``. The same runs give the same
bytes. Nothing in it is executed, and file names are checked, so that nothing is written outside of the folder.
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
FRESH = "HYFREEDP_FRESH"  # environment variable that reproduce --fresh sets
_FILE = re.compile(r"[0-9a-f]{16}\.(csv|json)")


def pack(cells: Path, path: Path, keys: Container[str] | None = None) -> int:
    """Write the finished runs of a folder, or those with these keys, to ``path`` (not if there are none); how many."""
    records = sorted(file for file in cells.glob("*.json") if _FILE.fullmatch(file.name))
    records = [record for record in records if keys is None or record.stem in keys]
    if not records:
        return 0
    with replacing(path) as temporary:
        with tarfile.open(temporary, "w:xz", preset=9) as archive:
            for record in records:
                for file in (record.with_suffix(".csv"), record):  # the record last: it marks the run as finished
                    content = file.read_bytes()
                    member = tarfile.TarInfo(file.name)  # without time and user
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return len(records)


def read(path: Path) -> dict[str, bytes]:
    """The files of an archive by name; empty if it does not exist. ValueError if it is damaged or has other files."""
    found: dict[str, bytes] = {}
    if not path.exists():
        return found
    try:
        whole = io.BytesIO(lzma.decompress(path.read_bytes()))  # verifies the checksum, which tarfile would not read
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
    """Write those files of :func:`read` whose runs the folder lacks; runs that this machine finished stay.

    A run with steps but no record was interrupted: both of its files are replaced by the committed ones.
    """
    cells.mkdir(parents=True, exist_ok=True)
    # These files are not synced, so a power cut can leave empty ones, which count as missing.
    there = {name for name in files if (cells / name).exists() and (cells / name).stat().st_size}
    for name, content in files.items():
        key = Path(name).stem
        if name not in there or f"{key}.json" not in there:
            temporary = cells / f".{key}-{uuid.uuid4().hex}"
            temporary.write_bytes(content)
            os.replace(temporary, cells / name)


def unpack_committed(profile: str) -> None:
    """Unpack the committed runs of a profile, so that a notebook does not train them again; not with ``--fresh``."""
    here = workspace()
    if FRESH not in os.environ:
        unpack(read(here.results / profile / NAME), here.cells)
