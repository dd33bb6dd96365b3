"""The committed figures and executed notebooks: comparing them with those of a batch, and renewing them.

Nothing else writes into ``figures/``.
"""

from __future__ import annotations

import filecmp
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat

from hyfreedp.experiments.book import notebooks
from hyfreedp.experiments.book.exercises import with_solutions, without_solutions
from hyfreedp.experiments.store import archive
from hyfreedp.experiments.store.files import replacing, write_text
from hyfreedp.experiments.store.paths import workspace
from hyfreedp.experiments.store.provenance import environment, git
from hyfreedp.experiments.store.verdicts import Whose, scoreboard

# All other files are sources, which must be committed before outputs are made from them.
_OUTPUTS = ("figures/**", "notebooks/**/*.ipynb", "docs/verdicts.md")


def compare(theirs: Path, ours: Path, made: Sequence[str]) -> str:
    """A sentence on how many of the files ``made`` are equal in the folders ``theirs`` and ``ours``."""
    same, others, _ = filecmp.cmpfiles(theirs, ours, sorted(made), shallow=False)
    text = f"{len(same)} of {len(same) + len(others)} files are the committed ones, byte for byte"
    return text + (f"; different: {', '.join(others)}" if others else "")


def update(selected: Sequence[Path]) -> None:
    """Execute each source with its default parameters, and renew its files in ``figures/`` and both its .ipynb.

    If a notebook fails, its files stay. ``figures/made_with.json`` gets versions and hardware.

    Raises:
        RuntimeError: a file other than these outputs is not committed, or there is no repository.
    """
    if changed := uncommitted():
        raise RuntimeError(
            "outputs are made of committed sources only; commit or stash these first (and, to have both in one commit, "
            f"amend it afterwards): {', '.join(changed)}"
        )
    here = workspace()
    for profile in {notebooks.defaults(source)["profile"] for source in selected}:  # else all would be trained again
        archive.unpack_committed(profile)
    record = here.figures / "made_with.json"
    for source in selected:
        print(f"{source.stem}: executing", flush=True)
        student, solved = source.with_suffix(".ipynb"), notebooks.solutions(source)
        with tempfile.TemporaryDirectory() as folder:
            made = notebooks.make(source, executing := Path(folder) / student.name, {})
            executed = nbformat.read(executing, as_version=4)
        output = here.output(notebooks.defaults(source)["profile"])
        for name in made:
            with replacing(here.figures / name) as temporary:
                shutil.copyfile(output / name, temporary)
        for path, copy in ((student, without_solutions(executed)), (solved, with_solutions(executed))):
            write_text(path, nbformat.writes(copy) + "\n")
        known = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        known[source.stem] = environment()
        write_text(record, json.dumps(known, indent=1, sort_keys=True) + "\n")
    if (page := here.root / "docs" / "verdicts.md").exists():
        write_text(page, with_boards(page))


def with_boards(page: Path) -> str:
    """The text of docs/verdicts.md with lists made from the committed verdicts."""
    text, pages = page.read_text(encoding="utf-8"), [notebooks.page(one, page.parent) for one in notebooks.sources()]
    headings: dict[str, Whose] = {"The paper's claims": "the paper's", "Ours": "ours"}
    for heading, whose in headings.items():
        before, after = text.split(f"\n## {heading}\n\n")
        rest = after.partition("\n\n")[2]  # after the old list
        text = f"{before}\n## {heading}\n\n{scoreboard(pages, whose)}\n" + (f"\n{rest}" if rest else "")
    return text


def uncommitted() -> list[str]:
    """Changed, new and deleted files of the repository, without outputs; RuntimeError if there is no repository."""
    apart = [f":(exclude,top,glob){name}" for name in _OUTPUTS]
    told = git("status", "--porcelain", "--untracked-files=all", "-z", "--", ":(top)", *apart, root=workspace().root)
    return [line[3:] for line in told.split("\0") if line]
