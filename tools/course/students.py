"""The course for students: ``python tools/course/students.py`` packs ``build/hyfreedp-course.zip``.

Files that give answers away are left out, and the module with right answers is compressed, so that nobody reads it by
accident. Links to files that are not in the zip become plain text.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from pathlib import Path

from hyfreedp.experiments.store.files import replacing
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.experiments.store.provenance import git

FOLDER = "hyfreedp-course"
# Sources of notebooks contain solutions, and tests their numbers.
FOR_TEACHERS = ["notebooks/*.py", "notebooks/slides.json", "*/solutions/*", "docs/teaching.md"]
FOR_TEACHERS += ["tests/*", "tools/*", "workflow/*", ".ci/*", "figures/*.pdf"]
_ANSWERS = "hyfreedp/experiments/book/answers.py"
_LINK = re.compile(r"\[([^][]+)\]\(([^()#\s]+)[^()\s]*\)")


def pack(root: Path, path: Path) -> None:
    """Write a zip of all files that git tracks in ``root``, without :data:`FOR_TEACHERS`."""
    every, names = _tracked(root), _tracked(root, *(f":!{pattern}" for pattern in FOR_TEACHERS))
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in names:
            content = (root / name).read_bytes()
            if name == _ANSWERS:
                hidden = zlib.compress(content).hex()
                content = f'import zlib\n\nexec(zlib.decompress(bytes.fromhex("{hidden}")))\n'.encode()
            elif name.endswith((".md", ".ipynb")):
                content = _without_links(content.decode(), Path(name).parent, set(every) - set(names)).encode()
            packed.writestr(f"{FOLDER}/{name}", content)


def _without_links(text: str, folder: Path, missing: set[str]) -> str:
    def mended(link: re.Match[str]) -> str:
        gone = os.path.normpath(folder / link[2]) in missing
        return f"{link[1]} (not in this copy)" if gone else link[0]

    return _LINK.sub(mended, text)


def _tracked(root: Path, *patterns: str) -> list[str]:
    return [name for name in git("ls-files", "-z", "--", ".", *patterns, root=root).split("\0") if name]


if __name__ == "__main__":
    target = workspace().build / f"{FOLDER}.zip"
    pack(workspace().root, target)
    print(f'{target}: unpack it, then run "make course" there; on a hosted notebook upload it')
