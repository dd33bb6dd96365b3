"""A small project of notebooks for the tests of the batch run and its report; no kernel unless a test wants one."""

import jupytext
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from hyfreedp.experiments.book import batch, notebooks

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360000002000001e221bc330000000049454e44ae426082"
)

PARAMETERS = 'profile = "laptop"\nepsilon = 3.0\nseeds = 3\ntask = "digits"'

# Plain files instead of plots.save, so that a kernel need not import PyTorch.
BODY = """
import json, os, pathlib
figures = pathlib.Path(os.environ["HYFREEDP_ROOT"]) / "build" / profile / "figures"
cells = pathlib.Path(os.environ["HYFREEDP_CELLS"])
for folder in (figures, cells):
    folder.mkdir(parents=True, exist_ok=True)
with open(cells / "log.txt", "a") as log:
    log.write("{stem}\\n")
made = {{"figure": "{stem}", "shows": "a dot", "claim": "", "summary": [], "inputs": []}}
made["parameters"] = {{"profile": profile, "epsilon": epsilon, "task": task}}
(figures / "{stem}.png").write_bytes(bytes.fromhex("{pixel}"))
(figures / "{stem}.json").write_text(json.dumps(made))
"""


class Project:
    """A workspace with notebooks, and a package that they are executed again for."""

    def __init__(self, workspace):
        self.notebooks, self.build = workspace.notebooks, workspace.build
        self.figures, self.cells = workspace.output("smoke"), workspace.cells
        self.package = workspace.root / "package"
        self.notebooks.mkdir()
        self.package.mkdir()

    def write(self, stem, body=""):
        """A notebook that logs its execution and makes one figure, then runs ``body``."""
        code = BODY.format(stem=stem, pixel=PIXEL.hex()) + body
        cells = [
            new_markdown_cell(f"# Title of {stem}"),
            new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}),
            new_code_cell(code),
        ]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook = new_notebook(cells=cells, metadata={"kernelspec": kernel})
        jupytext.write(notebook, self.notebooks / f"{stem}.py", fmt="py:percent")

    def log(self):
        """Stems of the notebooks executed so far, in order."""
        path = self.cells / "log.txt"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def project(workspace, monkeypatch):
    made = Project(workspace)
    monkeypatch.setattr(batch, "PACKAGE", made.package)
    return made


@pytest.fixture
def in_process(monkeypatch):
    """Execution without a kernel: the cells one after the other, the parameters after theirs."""

    def execute(source, output, parameters):
        namespace = {}
        for cell in jupytext.read(source).cells:
            if cell.cell_type == "code":
                exec(cell.source, namespace)
            if "parameters" in cell.metadata.get("tags", []):
                namespace |= parameters
        output.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(new_notebook(metadata={"parameters": parameters}), output)

    monkeypatch.setattr(notebooks, "execute", execute)
