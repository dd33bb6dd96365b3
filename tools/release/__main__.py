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
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, str(ROOT))
        (wheel,) = Path(folder).glob("*.whl")
        print("| Python | PyTorch | README | tests/core | Date |\n| --- | --- | --- | --- | --- |", flush=True)
        for python in ("3.11", "3.12", "3.13"):
            for torch in ("oldest", "newest"):
                ends = " | ".join(checked(wheel, python, torch, arguments.tests))
                print(f"| {python} | {ends} | {date.today()} |", flush=True)


def checked(wheel: Path, python: str, torch: str, tests: str | None) -> tuple[str, str, str]:
    """PyTorch's version, and how the README's example and the tests ended, in an environment made for them."""
    with tempfile.TemporaryDirectory() as folder:
        run("uv", "venv", "--quiet", "--clear", "--python", python, folder)
        interpreter = str(Path(folder) / "bin" / "python")
        install = ("uv", "pip", "install", "--python", interpreter, *([oldest_torch()] if torch == "oldest" else []))
        run(*install, wheel)
        version = run(interpreter, "-c", "import torch; print(torch.__version__)").strip()
        readme = ended(interpreter, "-c", example())
        if tests is None:
            return version, readme, "not run"
        run(*install, f"{wheel}[dev]")
        return version, readme, ended(interpreter, "-m", "pytest", "-q", "-n", tests, ROOT / "tests" / "core")


def oldest_torch() -> str:
    """The requirement of the oldest PyTorch that pyproject.toml allows."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return next(one for one in required if one.startswith("torch>=")).replace(">=", "==") + ".*"


def example() -> str:
    """The program of the README."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)[0]


def run(*command: str | Path) -> str:
    """The output of a command; RuntimeError with its errors if it fails."""
    done = started(*command)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-2000:]}")
    return done.stdout


def ended(*command: str | Path) -> str:
    """The last line that a command prints, or of its error, which is shown whole."""
    done = started(*command)
    if done.returncode:
        print(done.stdout[-20000:], done.stderr[-5000:], file=sys.stderr, flush=True)
    lines = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip().splitlines()
    return lines[-1].strip("= ") if lines else f"exit status {done.returncode}"


def started(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """A command that ran outside of the repository, so that the installed package is imported."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, check=False
        )


if __name__ == "__main__":
    main()
