"""Execute the notebooks: all of a profile in batch, or each source into the .ipynb that is committed beside it."""

from __future__ import annotations

import json
import time
import traceback
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import papermill

from hyfreedp.experiments.files import replacing
from hyfreedp.experiments.paths import BUILD, FIGURES, NOTEBOOKS

PROFILES = ("smoke", "laptop")


def sources() -> list[Path]:
    """The notebooks' percent-format sources, in order."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.py"))


def execute(source: Path, output: Path, parameters: dict[str, Any]) -> None:
    """Run one source with papermill and write the executed notebook, without machine-dependent metadata.

    Raises:
        papermill.PapermillExecutionError: a cell failed; ``output`` is left as it was.
    """
    notebook = jupytext.read(source)
    with replacing(output) as temporary:
        nbformat.write(notebook, temporary)
        papermill.execute_notebook(
            str(temporary), str(temporary), parameters=parameters, cwd=str(source.parent), progress_bar=False
        )
        executed = nbformat.read(temporary, as_version=4)
        _clean(executed)
        nbformat.write(executed, temporary)


def reproduce(profile: str) -> int:
    """Execute all notebooks of a profile into ``build/``, print one line each and what they found; exit status."""
    failed = []
    for source in sources():
        print(f"{source.stem}: running (profile {profile})", flush=True)
        started = time.perf_counter()
        try:
            execute(source, BUILD / profile / f"{source.stem}.ipynb", {"profile": profile})
        except papermill.PapermillExecutionError:
            failed.append(source.stem)
            traceback.print_exc()
            continue
        print(f"{source.stem}: done in {time.perf_counter() - started:.0f} s", flush=True)
        for path in sorted(FIGURES.glob(f"{source.stem}*.json")):
            print(f"\nfigures/{path.stem}.png")
            for line in json.loads(path.read_text(encoding="utf-8"))["summary"]:
                print(f"  {line}")
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def pair() -> int:
    """Execute each source with its own parameters into the .ipynb beside it; exit status."""
    for source in sources():
        print(f"{source.stem}: executing", flush=True)
        execute(source, source.with_suffix(".ipynb"), {})
    return 0


def _clean(notebook: nbformat.NotebookNode) -> None:
    """Drop what differs from run to run: papermill's paths and times, all but the last state of progress bars."""
    notebook.metadata.pop("papermill", None)
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        outputs: list[nbformat.NotebookNode] = []
        for output in cell.get("outputs", []):
            last = outputs[-1] if outputs else None
            if last and output.output_type == last.output_type == "stream" and output.name == last.name:
                last.text += output.text
            else:
                outputs.append(output)
        for output in outputs:
            if output.output_type == "stream":
                output.text = "\n".join(line.rsplit("\r", 1)[-1] for line in output.text.split("\n"))
        if cell.cell_type == "code":
            cell.outputs = outputs
