"""Which test notices which fault: every mutant of ``mutant_list.py`` on a copy of the project, and the table of kills.

``make mutants`` copies the tracked files once, with what the working tree holds of them, and checks that the tests
named by the mutants pass there. For each mutant one place of a further copy is changed and its named tests are run, up
to the first failure; if they all pass, the whole fast suite is. A mutant counts as killed only by a test that ran and
failed: neither by a module that cannot be imported nor by a broken fixture. Kills are kept in build/mutants and hold as
long as the package, the mutant and its named tests stay the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from mutant_list import MUTANTS, Mutant
from tqdm import tqdm

from hyfreedp.experiments.store.files import write_text
from hyfreedp.experiments.store.paths import ROOT
from hyfreedp.experiments.store.provenance import commit, environment

RESULTS = ROOT / "build" / "mutants"
TABLE = ROOT / "tools" / "mutation" / "MUTANTS.md"
TEST_SECONDS = 120  # of a single test
SUITE_SECONDS = 3600  # of one run of pytest

# Not in a mutant's suite: the check that its `old` text is there, and that of the code's style, which proves nothing.
LEFT_OUT = ("--ignore=tests/test_mutants.py", "--deselect=tests/test_packaging.py::test_ruff")

# Tests must see the copy, though the package is installed from elsewhere.
PYTEST = """
import sys, pytest, hyfreedp
from pathlib import Path
if not Path(hyfreedp.__file__).is_relative_to(Path.cwd()):
    sys.exit(f"the copy in {Path.cwd()} is not what is imported, but {hyfreedp.__file__}")
sys.exit(pytest.main(sys.argv[1:]))
"""

# An error that says that the mutated code does not run at all, or that the machine is slow: it kills nothing.
NO_KILL = ("ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "Failed: Timeout")


class Outcome(NamedTuple):
    """How a run of pytest ended.

    Attributes:
        failed: the first test that failed, None if all passed.
        error: what it said, in one line.
        seconds: from the start of pytest to its end.
        broken: why the run tells nothing, empty if it does.
    """

    failed: str | None
    error: str
    seconds: float
    broken: str = ""


def snapshot(target: Path) -> None:
    """Copy the tracked files, with the working tree's content."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # neither deleted nor a link to a folder
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def digest(root: Path, mutant: Mutant) -> str:
    """Of the mutant and what its tests see: the package, the tests it names and the modules that tests share."""
    sha = hashlib.sha256(repr(mutant).encode())
    own = {named.partition("::")[0] for named in named_tests([mutant])}
    tests = (root / "tests").rglob("*.py")
    seen = [path for path in tests if not path.name.startswith("test_") or path.relative_to(root).as_posix() in own]
    for path in sorted([*(root / "hyfreedp").rglob("*.py"), *seen]):
        sha.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return sha.hexdigest()


def run_pytest(root: Path, arguments: Sequence[str]) -> Outcome:
    """Run tests of the copy in ``root`` up to the first failure."""
    report = root / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-c", PYTEST, "-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
    command += [f"--junitxml={report}", "-o", "junit_family=xunit1", *arguments]
    variables = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, timeout=SUITE_SECONDS)
    except subprocess.TimeoutExpired:
        return Outcome(None, "", SUITE_SECONDS, f"pytest took more than {SUITE_SECONDS} s")
    if not report.exists():
        return Outcome(None, "", 0.0, f"pytest did not run: {(done.stderr or done.stdout).strip()[-300:]}")
    return read_report(report)


def read_report(path: Path) -> Outcome:
    """The outcome that a JUnit file of pytest tells."""
    suite = ElementTree.parse(path).getroot()[0]
    seconds = float(suite.get("time", "0"))
    for case in suite.iter("testcase"):
        test = f"{case.get('file')}::{case.get('name')}"
        if (error := case.find("error")) is not None:
            return Outcome(test, "", seconds, f"{test} could not run: {_line(error)}")
        if (failure := case.find("failure")) is not None:
            line = _line(failure)
            broken = f"{test} ended by {line}" if line.startswith(NO_KILL) else ""
            return Outcome(test, line, seconds, broken)
    if int(suite.get("tests", "0")) == 0:
        return Outcome(None, "", seconds, "no test ran")
    return Outcome(None, "", seconds)


def _line(element: ElementTree.Element) -> str:
    return " ".join(element.get("message", "").split())[:200]


def named_tests(mutants: Sequence[Mutant]) -> list[str]:
    """The tests that the mutants name, as pytest wants them, each once."""
    named = (name.partition("::") for mutant in mutants for name in mutant.tests)
    paths = ((Path("tests", file), colons + test) for file, colons, test in named)
    return list(dict.fromkeys(f"{path.with_name(f'test_{path.name}.py').as_posix()}{test}" for path, test in paths))


def hunt(mutant: Mutant, original: Path, suite_passes: cache) -> Outcome:
    """Run the tests against one mutant."""
    with tempfile.TemporaryDirectory(prefix=f"mutant-{mutant.name}-") as folder:
        root = Path(folder) / "copy"
        shutil.copytree(original, root)
        mutant.apply(root)
        outcome = run_pytest(root, named_tests([mutant]))
        if outcome.failed is None and not outcome.broken:
            suite_passes()
            outcome = run_pytest(root, ["tests", *LEFT_OUT])
    return outcome


def must_pass(original: Path, arguments: Sequence[str]) -> None:
    """Stop unless the tests pass without any fault."""
    outcome = run_pytest(original, arguments)
    if outcome.failed or outcome.broken:
        sys.exit(f"no fault can be seen, since tests fail without one: {outcome.broken or outcome.failed}")


def hunt_all(mutants: Sequence[Mutant], jobs: int) -> dict[Mutant, Outcome]:
    """The outcome of every mutant; those already known are not run again."""
    outcomes: dict[Mutant, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        original = Path(folder) / "original"
        snapshot(original)
        states = {mutant: digest(original, mutant) for mutant in mutants}
        for mutant in mutants:
            path = RESULTS / f"{mutant.name}.json"
            known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if known.get("state") == states[mutant]:
                outcomes[mutant] = Outcome(**known["outcome"])
        left = [mutant for mutant in mutants if mutant not in outcomes]
        bar = tqdm(total=len(mutants), initial=len(outcomes), unit="mutant")
        if left:
            bar.set_description("tests without a fault")
            must_pass(original, named_tests(left))
        suite_passes = cache(partial(must_pass, original, ["tests", *LEFT_OUT]))
        with bar, ThreadPoolExecutor(jobs) as pool:
            hunts = {pool.submit(hunt, mutant, original, suite_passes): mutant for mutant in left}
            for done in as_completed(hunts):
                mutant, outcome = hunts[done], done.result()
                outcomes[mutant] = outcome
                if is_killed(outcome):
                    kept = {"state": states[mutant], "outcome": outcome._asdict()}
                    write_text(RESULTS / f"{mutant.name}.json", json.dumps(kept, indent=1))
                bar.set_description(mutant.name)
                bar.update()
    return {mutant: outcomes[mutant] for mutant in mutants}


def is_killed(outcome: Outcome) -> bool:
    """Whether a test ran and failed."""
    return outcome.failed is not None and not outcome.broken


def table(outcomes: dict[Mutant, Outcome]) -> str:
    """The Markdown page of who killed whom."""
    versions = environment()
    killed = sum(is_killed(outcome) for outcome in outcomes.values())
    lines = [
        "# Deliberate faults, and the tests that notice them",
        "",
        "Generated by `make mutants`; change `tools/mutation/mutant_list.py`, not this page.",
        "Each fault was made in a copy of the package, and the tests were run until the first one failed.",
        "",
        f"**{killed} of {len(outcomes)} mutants killed.** Commit {commit()}, "
        + ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "opacus", "dp-accounting", "numpy"))
        + ".",
        "",
        "| mutant | file | what is broken | killed by | seconds |",
        "|---|---|---|---|---:|",
    ]
    for mutant, outcome in outcomes.items():
        by = f"`{outcome.failed}`" if is_killed(outcome) else f"**{outcome.broken or 'survives'}**"
        cells = (mutant.name, f"`{mutant.file}`", mutant.what, by, f"{outcome.seconds:.1f}")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants; no table unless --out is given")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default 1)")
    parser.add_argument("--out", type=Path, help=f"file of the table (default {TABLE.relative_to(ROOT)})")
    arguments = parser.parse_args()
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := set(arguments.only or ()) - known.keys():
        parser.error(f"--only must name mutants of tools/mutation/mutant_list.py, got {', '.join(sorted(unknown))}")
    if arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {arguments.jobs}")
    chosen = [known[name] for name in arguments.only] if arguments.only else MUTANTS
    outcomes = hunt_all(chosen, arguments.jobs)
    out = arguments.out or (None if arguments.only else TABLE)
    if out:
        write_text(out, table(outcomes))
    for mutant, outcome in outcomes.items():
        if not is_killed(outcome):
            print(f"{mutant.name}: {outcome.broken or 'survives: no fast test fails'}")
    missed = sum(not is_killed(outcome) for outcome in outcomes.values())
    print(f"{len(outcomes) - missed} of {len(outcomes)} mutants killed")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
