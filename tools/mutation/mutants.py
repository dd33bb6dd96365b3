"""Mutation testing: makes each fault of ``mutants.txt`` in a copy of the package, and runs the tests that should fail.

A mutant is killed only by a test that ran and failed, not by an import error or a timeout.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.txt")
NO_KILL = ("ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "Timeout", "ERROR ")


class Mutant(NamedTuple):
    """One fault: ``old``, which is once in the package, becomes ``new``; a test in the files ``tests`` should fail."""

    name: str
    tests: tuple[str, ...]
    what: str
    old: str
    new: str

    def file(self, root: Path) -> Path:
        """The file of the package below ``root`` with the old text.

        Raises:
            ValueError: the text is not there exactly once.
        """
        files = [path for path in (root / "hyfreedp").rglob("*.py") if "experiments" not in path.parts]
        places = [path for path in files for _ in range(path.read_text(encoding="utf-8").count(self.old))]
        if len(places) != 1:
            names = [path.name for path in places]
            raise ValueError(f"mutant {self.name!r}: its old text must stand at one place of the package, got {names}")
        return places[0]

    def apply(self, root: Path) -> Path:
        """Make the fault in the package below ``root``; returns the changed file."""
        path = self.file(root)
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")
        return path


def mutants() -> list[Mutant]:
    """The mutants in ``mutants.txt``, whose first lines explain its format."""
    found = []
    for block in LIST.read_text(encoding="utf-8").split("\n\n")[2:]:
        if block.startswith("#"):
            continue
        head, what, *lines = block.strip("\n").split("\n")
        name, *tests = head.replace(":", "").split()
        files = tuple(f"tests/{test.replace('/', '/test_')}.py" for test in tests)
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        found.append(Mutant(name, files, what, old, new))
    return found


def run_tests(root: Path, files: Sequence[str]) -> str:
    """pytest's line on the first failing test of the copy in ``root``; empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--tb=line", "-p", "no:cacheprovider", *files]
    variables = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    told = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return told[0] if told else f"ERROR {(done.stderr or done.stdout).strip()[-300:]}"


def hunt(mutant: Mutant | None, files: Sequence[str]) -> str:
    """:func:`run_tests` in a copy of the working tree's tracked files, with a mutant or, if None, without."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name)
        if mutant:
            mutant.apply(Path(folder))
        return run_tests(Path(folder), files)


def killed(told: str) -> bool:
    """Whether this line, from :func:`run_tests`, is of a test that ran and failed."""
    return told.startswith("FAILED ") and not any(mark in told for mark in NO_KILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    every = {mutant.name: mutant for mutant in mutants()}
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=every, default=every, help="these only")
    chosen = [every[name] for name in parser.parse_args().only]
    if told := hunt(None, sorted({file for mutant in chosen for file in mutant.tests})):
        sys.exit(f"no fault can be seen, since tests fail without one: {told}")
    missed = 0
    for mutant in chosen:
        told = hunt(mutant, mutant.tests)
        missed += not killed(told)
        print(f"{mutant.name}: {told or 'survives'}"[:180], flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutants killed")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
