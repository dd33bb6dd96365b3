"""Before a release: tries the wheel with each Python and with the oldest and newest PyTorch.

Each environment is new, installs the wheel as users do, and runs the README's example and, with --tests, the core's
tests. `uv` makes it (pip install uv), and stores each version of PyTorch, several GB, only once.
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
    """The requirement for the oldest PyTorch that pyproject.toml allows, as "torch==2.8.*"."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return next(one for one in required if one.startswith("torch>=")).replace(">=", "==") + ".*"


def example() -> str:
    """The program of the README."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)[0]


def run(folder: str, *command: str, check: bool = False) -> str:
    """Run a command outside of the repository, so that it imports the installed package; its last line of output.

    If it fails, all output is printed, and with ``check`` CalledProcessError is raised.
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
