"""The notebooks: finding them, their parameters, and executing one."""

from __future__ import annotations

import ast
import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import papermill
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from traitlets import Int
from traitlets.config import Config

from hyfreedp.checks import nearest
from hyfreedp.experiments.store.files import replacing
from hyfreedp.experiments.store.paths import workspace

LINKS = "links"  # tag of cells that are added when a notebook is executed
# A cell that installs the package on a hosted notebook, and elsewhere does nothing. {get} makes the folder.
HOSTED = """\
from importlib.util import find_spec

if not find_spec("hyfreedp"):  # a hosted notebook, as on Colab: takes PyTorch for CPUs, then the course
    {get}
    %pip install -q torch --index-url https://download.pytorch.org/whl/cpu
    %pip install -q "./hyfreedp-course[notebooks]"
    %env HYFREEDP_ROOT=hyfreedp-course"""
SAVES = "saves"  # tag of cells that are added, executed and removed again
ANSWER = "### Answer"  # heading of the answer to a question, folded in Jupyter
PROFILES = ("smoke", "laptop", "gpu", "paper")

# Messages to and from a kernel use local TCP ports, to which other users of the machine might listen.
_ENCRYPTED = {"KernelManager": {"transport_encryption": "auto"}}


class QuietKernel(AsyncKernelManager):
    """A kernel whose output, and that of its subprocesses, goes to a file instead of our terminal."""

    file = Int(subprocess.DEVNULL, help="descriptor of the file").tag(config=True)

    async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]  # as its superclass's is
        env = os.environ | {"OMP_NUM_THREADS": "1"}  # the last bit of a calibrated sigma, and all noise, depend on it
        await super().start_kernel(stdout=self.file, stderr=self.file, env=env, **options)


def sources(only: Sequence[str] = ()) -> list[Path]:
    """Sources of all notebooks, or of those with these numbers ("05") or names, in order; ValueError if unknown."""
    found = sorted(workspace().notebooks.rglob("[0-9][0-9]_*.py"), key=lambda source: source.stem)
    known = {key: source for source in found for key in (source.stem, source.stem[:2])}
    for name in only:
        if name not in known:
            stems = [source.stem for source in found]
            raise ValueError(f"no notebook {name!r}: there are {', '.join(stems)}{nearest(name, stems)}")
    wanted = {known[name] for name in only}
    return [source for source in found if not only or source in wanted]


def solutions(source: Path) -> Path:
    """The path of a notebook's executed copy with solutions; the copy beside the source is the student's."""
    return source.parent / "solutions" / f"{source.stem}.ipynb"


def page(source: Path, folder: Path) -> str:
    """A relative link from ``folder`` to a notebook's executed copy."""
    return os.path.relpath(source.with_suffix(".ipynb"), folder)


def title(source: Path) -> str:
    """The notebook's first heading."""
    return next(line[4:] for line in source.read_text(encoding="utf-8").splitlines() if line.startswith("# # "))


def defaults(source: Path) -> dict[str, Any]:
    """Default of each parameter by its name: the literals assigned in the cell tagged ``parameters``."""
    cells = [cell for cell in jupytext.read(source).cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise ValueError(f"{source.name} must have one cell tagged 'parameters', it has {len(cells)}")
    assigned = [line for line in ast.parse(cells[0].source).body if isinstance(line, ast.Assign)]
    return {ast.unparse(line.targets[0]): ast.literal_eval(line.value) for line in assigned}


def execute(source: Path, output: Path, parameters: dict[str, Any]) -> None:
    """Execute a source with papermill and write the notebook to ``output``, without metadata of the machine.

    Links to other notebooks are added (:func:`_add_links`), and figures and tables are saved (:func:`_add_saving`).

    Raises:
        papermill.PapermillExecutionError: a cell failed; ``output`` is unchanged.
        DeadKernelError: the kernel died; its output is in a note.
    """
    notebook = jupytext.read(source)
    _add_links(notebook, source)
    _add_saving(notebook, list(defaults(source)))
    with replacing(output) as temporary, tempfile.TemporaryFile() as written:
        nbformat.write(notebook, temporary)
        try:
            papermill.execute_notebook(
                str(temporary),
                str(temporary),
                parameters=parameters,
                resources={"metadata": {"path": str(source.parent)}},  # working directory of the kernel, not of us
                progress_bar=False,
                kernel_manager_class=QuietKernel,
                coalesce_streams=True,  # keeps the last state of progress bars
                config=Config(_ENCRYPTED | {"QuietKernel": {"file": written.fileno()}}),
            )
        except DeadKernelError as error:
            written.seek(0)
            error.add_note(written.read().decode(errors="replace"))
            raise
        executed = nbformat.read(temporary, as_version=4)
        _clean(executed)
        if parameters:
            executed.metadata["parameters"] = parameters
        nbformat.write(executed, temporary)


def make(source: Path, output: Path, parameters: dict[str, Any]) -> list[str]:
    """:func:`execute`, and return the names of the figures and tables that the notebook wrote."""
    folder = workspace().output((defaults(source) | parameters)["profile"])
    for left in folder.glob(f"{source.stem}*"):
        left.unlink()
    execute(source, output, parameters)
    return sorted(path.name for path in folder.glob(f"{source.stem}*"))


def _add_links(notebook: nbformat.NotebookNode, source: Path) -> None:
    """Add links to the notebooks before and after, at the top and at the end, and at the top what ``course.json`` has.

    That is: what to read before, the running time, and the GitHub repository for links to Colab and Binder. Unless the
    notebook is "alone" (needs no package), a cell is added that installs the package on such a host.
    """
    order = sources()
    place = order.index(source)
    before = [f"[← {title(one)}]({page(one, source.parent)})" for one in order[:place][-1:]]
    after = [f"[{title(one)} →]({page(one, source.parent)})" for one in order[place + 1 :][:1]]
    if not (line := " · ".join(before + after)):  # the only one
        return
    path = workspace().notebooks / "course.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    header, own, repository = [line], known.get(source.stem, {}), known.get("repository", "")
    get = "!unzip -q hyfreedp-course.zip  # upload it first"
    if repository:
        get = f"!git clone -q --depth 1 https://github.com/{repository} hyfreedp-course"
        place_there = source.with_suffix(".ipynb").relative_to(workspace().root).as_posix()
        colab = f"https://colab.research.google.com/github/{repository}/blob/main/{place_there}"
        binder = f"https://mybinder.org/v2/gh/{repository}/main?labpath={place_there}"
        header.append(f"[Open in Colab]({colab}) · [Open in Binder]({binder})")
    if own:
        text = f"Before this: {own['needs']}. Runs for about {own['time']} on two cores, with the committed runs."
        header.append(f"*{text} `reproduce` puts figures and tables into `build/<profile>/figures/`.*")
    cells, tag = nbformat.v4, {"tags": [LINKS]}
    notebook.cells.insert(1, cells.new_markdown_cell("\n\n".join(header), id="links-top", metadata=tag))
    if not own.get("alone"):
        folded = {"tags": [LINKS, "remove-cell"], "jupyter": {"source_hidden": True}}  # on the site, and in JupyterLab
        notebook.cells.insert(2, cells.new_code_cell(HOSTED.format(get=get), id="links-hosted", metadata=folded))
    notebook.cells.append(cells.new_markdown_cell(line, id="links-end", metadata=tag))


def _add_saving(notebook: nbformat.NotebookNode, parameters: list[str]) -> None:
    """After each cell with metadata ``figure`` or ``table``, add a cell that saves the variable of that name.

    The metadata's value is the file's name. Its ``shows``, ``claim`` and ``inputs``, and the notebook's ``findings``,
    describe it, see ``plots.save``.
    """
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        for kind, function in (("figure", "save"), ("table", "save_table")):
            if kind in cell.metadata:
                described = {name: cell.metadata.get(name, "") for name in ("shows", "claim")}
                described["inputs"] = cell.metadata.get("inputs", [])
                code = (
                    "from hyfreedp.experiments.store import plots as _plots\n"
                    f"_plots.{function}({kind}, {cell.metadata[kind]!r}, summary=findings, **{described!r}, "
                    f"parameters={{_name: globals()[_name] for _name in {parameters}}})"
                )
                cells.append(nbformat.v4.new_code_cell(code, metadata={"tags": [SAVES]}))
    notebook.cells = cells


def _clean(notebook: nbformat.NotebookNode) -> None:
    """Fold answers, remove papermill's metadata and the cells that save, and number the cells again."""
    notebook.metadata.pop("papermill", None)
    notebook.cells = [cell for cell in notebook.cells if SAVES not in cell.metadata.get("tags", [])]
    counts = itertools.count(1)
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith(ANSWER):
            cell.metadata["jp-MarkdownHeadingCollapsed"] = True
        if cell.get("execution_count"):
            cell.execution_count = next(counts)
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = cell.execution_count
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
