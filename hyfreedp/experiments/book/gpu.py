"""Fills ``data/results/gpu`` on a machine with an accelerator, in phases: ``python -m hyfreedp.experiments.book.gpu``.

A phase is a command of its own and takes at most nine minutes. Those that take longer in all are resumed by the same
command until they are done. What a phase needs and writes is listed by ``--dry-run``, which also says what is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement

from hyfreedp.devices import CPU, default_device, hardware
from hyfreedp.experiments.store.files import write_text
from hyfreedp.experiments.store.paths import workspace

MINUTES = 8.5  # of a phase: below the ten minutes that such machines often allow a command
_ENDING = 30.0  # seconds that an interrupted command may take to end

_MODELS = ("vit_small", "vit_base", "gpt2", "llama2_7b")
_BENCHMARK = ("-m", "hyfreedp.experiments.benchmark", "--device", "accelerator", "--resume")
_TABLES = (
    "opacus",
    "autodp",
    "tqdm",
    "pandas",
    "matplotlib",
    "seaborn",
    "scikit-learn",
    "filelock",
    "packaging",
    "ipykernel",
)
_TIMING = (*_TABLES, "timm", "transformers", "peft")
_IMAGES = (*_TABLES, "timm", "transformers", "peft", "safetensors", "torchvision")
_NOTEBOOKS = ("papermill", "jupytext", "nbformat", "jupyter-client", "jupyter-core", "nbclient", "traitlets", "psutil")


@dataclass(frozen=True)
class Phase:
    """One command.

    Attributes:
        what: in a sentence.
        command: arguments of Python, from the repository's root.
        writes: files below the root; some are shared, each phase adding its rows.
        packages: that it imports, beyond those of the core; in the versions that the project asks for.
        data: sets that ``$HYFREEDP_DATA`` must have.
        after: phases that must be done before.
        sliced: whether it takes longer than a phase may, and is resumed.
    """

    what: str
    command: tuple[str, ...]
    writes: tuple[str, ...]
    packages: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    sliced: bool = False


def _efficiency(what: str, *options: str, record: str = "") -> Phase:
    return Phase(what, (*_BENCHMARK, *options), (f"data/results/gpu/efficiency{record}.csv",), _TIMING, sliced=True)


PHASES: dict[str, Phase] = {
    "tests": Phase(
        "the tests that need an accelerator",
        ("-m", "pytest", "-m", "gpu", "tests/gpu", "--junitxml=build/gpu/tests.xml"),
        ("build/gpu/tests.xml",),
        ("pytest", "pytest-timeout", "hypothesis", *_NOTEBOOKS, *_IMAGES, "dadaptation", "prodigyopt"),
    ),
    **{
        f"efficiency-{model}": _efficiency(
            f'Tab. "eff" at the true shape of {model}, random weights', "--models", model, "--rounds", "5"
        )
        for model in _MODELS
    },
    "compile": _efficiency(
        "a step of vit_base with torch.compile and without",
        *("--models", "vit_base", "--contenders", "plain", "plain_compiled", "ours", "ours_compiled", "--rounds", "5"),
    ),
    "growth": _efficiency("how the cost grows with the shape", "--growth", "--rounds", "5", record="_growth"),
    "noise": _efficiency("what noise and checks cost", "--noise", record="_noise"),
    "learning": _efficiency(
        "what learning the rate costs in whole runs",
        *("--learning", "--models", "vit_small", "vit_base", "gpt2", "--rounds", "3"),
        record="_learning",
    ),
    "pretrain": Phase(
        "the larger ViT, pre-trained on Tiny ImageNet",
        ("-m", "hyfreedp.experiments.runs.pretrain", "tiny_imagenet"),
        ("data/checkpoints/tiny_imagenet.json", "data/checkpoints/tiny_imagenet.safetensors"),
        _IMAGES,
        ("tiny_imagenet",),
        sliced=True,
    ),
    "grid": Phase(
        "notebook 06's tables: CIFAR-10 and GTSRB from that ViT",
        ("-m", "hyfreedp.experiments", "grid", "--profile", "gpu"),
        ("data/results/gpu/image_classification.csv",),
        (*_NOTEBOOKS, *_IMAGES, "dadaptation", "prodigyopt"),
        ("cifar10", "gtsrb"),
        after=("pretrain",),
        sliced=True,
    ),
}


def missing(phase: Phase) -> list[str]:
    """What this machine lacks for a phase, in words; nothing of it has been run."""
    lacks = []
    if default_device() == CPU:
        lacks.append("an accelerator")
    lacks += _lacking(phase.packages)
    if phase.data and not os.environ.get("HYFREEDP_DATA"):
        lacks.append(f"HYFREEDP_DATA with {' and '.join(phase.data)}")
    return [*lacks, *(f"phase {name}" for name in phase.after if not _mark(name).exists())]


def _lacking(packages: Sequence[str]) -> list[str]:
    """Of the core's packages and of these: what is missing, or not in a version that the project asks for."""
    try:
        stated = [Requirement(text) for text in importlib.metadata.requires("hyfreedp") or ()]
    except importlib.metadata.PackageNotFoundError:
        return ["package hyfreedp itself: python -m pip install --no-index --no-deps --no-build-isolation -e ."]
    lacks = []
    for one in {one.name: one for one in stated if one.marker is None or one.name in packages}.values():
        try:
            found = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            lacks.append(f"package {one.name}")
        else:
            if not one.specifier.contains(found, prereleases=True):
                lacks.append(f"package {one.name}{one.specifier} ({found} is here)")
    return lacks


def listing(phases: Mapping[str, Phase]) -> str:
    """Every phase with its command, what it needs and writes, and how far it is."""
    lines = []
    for name, phase in phases.items():
        lacks = missing(phase)
        state = "done" if _mark(name).exists() else f"needs {', '.join(lacks)}" if lacks else "ready"
        lines += [
            f"{name}: {phase.what}" + (", in slices" if phase.sliced else ""),
            f"  {state}",
            f"  python {' '.join(phase.command)}",
            f"  packages: {', '.join(phase.packages) or 'the core'}; data: {', '.join(phase.data) or 'none'}",
            f"  writes {', '.join(phase.writes)}",
        ]
    return "\n".join(lines)


def run(phases: Mapping[str, Phase], minutes: float = MINUTES) -> int:
    """Run phases one after the other, those that are done left out; the exit status.

    Returns:
        0 if all are done; 1 if one failed or lacks something; 75 if one was interrupted and the same command goes on.
    """
    status = 0
    for name, phase in phases.items():
        if _mark(name).exists():
            print(f"{name}: done before", flush=True)
            continue
        if lacks := missing(phase):
            print(f"{name}: needs {', '.join(lacks)}", flush=True)
            status = 1
            continue
        print(f"{name}: {phase.what}", flush=True)
        code = _limited([sys.executable, *phase.command], workspace().root, 60 * minutes)
        if code == 0:
            write_text(_mark(name), f"{hardware(default_device())}\n")
        elif code is None and phase.sliced:
            print(f"{name}: {minutes:g} minutes are over; the same command goes on from here", flush=True)
            status = status or 75
        else:
            why = f"did not end within {minutes:g} minutes" if code is None else f"ended with status {code}"
            print(f"{name}: failed: {why}", flush=True)
            status = 1
    return status


def _limited(command: Sequence[str], folder: Path, seconds: float) -> int | None:
    """The exit status of a command; None if it was interrupted, as by Ctrl-C, because its time was over."""
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what a script starts in its background ignores it
    with subprocess.Popen(command, cwd=folder, preexec_fn=heard) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_ENDING)
            except subprocess.TimeoutExpired:
                process.kill()
            return None
        except BaseException:
            process.kill()
            raise


def _mark(name: str) -> Path:
    """There once a phase is done; removing it makes the phase run again."""
    return workspace().build / "gpu" / f"{name}.done"


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m hyfreedp.experiments.book.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 all done, 1 something failed or is missing, 75 time was over: run it again",
    )
    parser.add_argument("phases", nargs="*", metavar="PHASE", help=f"(default: all) among {', '.join(PHASES)}")
    parser.add_argument("--dry-run", action="store_true", help="only list them")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of a phase at most (default: %(default)s)")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.phases if name not in PHASES]:
        parser.error(f"PHASE must be among {', '.join(PHASES)}, got {', '.join(unknown)}")
    if not options.minutes > 0:
        parser.error(f"--minutes must be positive, got {options.minutes}")
    chosen = {name: PHASES[name] for name in options.phases or PHASES}
    if options.dry_run:
        print(listing(chosen))
        return 0
    return run(chosen, options.minutes)


if __name__ == "__main__":
    sys.exit(main())
