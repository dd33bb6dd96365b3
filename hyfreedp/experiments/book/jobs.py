"""What a batch runs: notebooks with parameters that were checked beforehand, and what becomes of them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hyfreedp.checks import nearest
from hyfreedp.experiments.book import notebooks
from hyfreedp.experiments.book.parameters import parse_value
from hyfreedp.experiments.store.paths import workspace


@dataclass(frozen=True)
class Job:
    """One notebook of a batch: its source and the parameters set in it, ``profile`` among them."""

    source: Path
    parameters: dict[str, Any]

    @property
    def name(self) -> str:
        """The stem of its files."""
        return self.source.stem

    @property
    def output(self) -> Path:
        """The folder of its figures and tables."""
        return workspace().output(self.parameters["profile"])

    @property
    def command(self) -> str:
        """The command line that does this job alone."""
        settings = [f"{name}={value}" for name, value in self.parameters.items() if name != "profile"]
        words = ["reproduce", "--profile", self.parameters["profile"], "--only", self.name]
        return shlex.join(["python", "-m", "hyfreedp.experiments", *words, *(["--set", *settings] if settings else [])])


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        status: "up to date" if an earlier batch finished the same job and its figures are still there.
        seconds: that its execution took, then or now.
        made: names of the files that it made, in its job's folder; none if it failed.
        made_with: versions, hardware and commit of that execution; none if it failed.
        error: the traceback if it failed, else empty.
    """

    job: Job
    status: Literal["done", "up to date", "failed"]
    seconds: float
    made: Sequence[str] = ()
    made_with: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Origin:
    """Where the training runs of a batch come from.

    Attributes:
        committed: keys of the committed runs that were read, or stood ready to be.
        trained: how many runs the batch trained itself.
        made_with: versions and hardware of the committed ones, a line each.
        again: a sentence on those that were trained once more, then a line each; none if all were trained here.
    """

    committed: frozenset[str] = frozenset()
    trained: int = 0
    made_with: Sequence[str] = ()
    again: Sequence[str] = ()

    def __str__(self) -> str:
        if not self.committed:
            return "every run was trained on this machine"
        ready = f"{len(self.committed):,} runs are read from committed records, {self.trained} others were trained here"
        return f"{ready}; {self.again[0]}" if self.again else ready


def plan(selected: Sequence[Path], profile: str, settings: Mapping[str, str]) -> list[Job]:
    """The jobs of a batch, all parameters checked before anything runs.

    Args:
        profile: one of :data:`hyfreedp.experiments.book.notebooks.PROFILES`.
        settings: parameter name -> text; each goes to those notebooks that have the parameter.

    Raises:
        ValueError: a name that no selected notebook has, or ``profile``.
        TypeError: a value that is not of the type of a notebook's default.
    """
    defaults = {source: notebooks.defaults(source) for source in selected}
    known = sorted({name for own in defaults.values() for name in own} - {"profile"})
    for name in settings:
        if name == "profile":
            raise ValueError("parameter profile is set by --profile")
        if name not in known:
            raise ValueError(
                f"no selected notebook has a parameter {name!r}: they take {', '.join(known)}{nearest(name, known)}"
            )
    jobs = []
    for source, own in defaults.items():
        parameters: dict[str, Any] = {"profile": profile}
        for name, text in settings.items():
            if name in own:
                try:
                    parameters[name] = parse_value(name, text, own[name])
                except TypeError as error:
                    raise TypeError(f"{source.stem}: {error}") from None
        jobs.append(Job(source, parameters))
    return jobs
