"""Before a release: the wheel on a clean environment of each Python, with the oldest and the newest PyTorch.

Each environment gets the wheel, as users do, runs the README's example, and, with --tests, the core's tests. `uv` makes
them (pip install uv): PyTorch's several GB lie on the disk once for each version.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/release", description=__doc__)
    parser.add_argument("--tests", metavar="PROCESSES", help="run tests/core, too, in so many processes (pytest's -n)")
    tests = parser.parse_args().tests
    print("| Python | PyTorch | README | tests/core | Date |\n| --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run(folder, sys.executable, "-m", "pip", "wheel", "--no-deps", str(ROOT), check=True)
        (wheel,) = map(str, Path(folder).glob("*.whl"))
        for python in ("3.11", "3.12", "3.13"):
            for torch in (oldest_torch(), "torch"):
                environment = ("uv", "run", "--isolated", "--no-project", "--python", python, "--with", torch)
                small, whole = ((*environment, "--with", wheel + extra, "python") for extra in ("", "[dev]"))
                version = run(folder, *small, "-c", "import torch; print(torch.__version__)", check=True)
                readme = run(folder, *small, "-c", example())
                ended = run(folder, *whole, "-m", "pytest", "-q", "-n", tests, f"{ROOT}/tests/core") if tests else "-"
                print(f"| {python} | {version} | {readme} | {ended} | {date.today()} |", flush=True)


def oldest_torch() -> str:
    """The requirement of the oldest PyTorch that pyproject.toml allows."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return next(one for one in required if one.startswith("torch>=")).replace(">=", "==") + ".*"


def example() -> str:
    """The program of the README."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)[0]


def run(folder: str, *command: str, check: bool = False) -> str:
    """The last line that a command prints, run outside of the repository, so that the installed package is imported.

    What a command that fails has printed is shown; with ``check`` it ends the program.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-20000:], done.stderr[-5000:], file=sys.stderr, flush=True)
    if check:
        done.check_returncode()
    return (done.stdout.strip() or done.stderr.strip()).splitlines()[-1].strip("= ")


if __name__ == "__main__":
    main()
