"""The rooms of the experiments: each imports only those before it."""

import ast
import subprocess
import sys

from cases import together

from hyfreedp.experiments.store.paths import ROOT

EXPERIMENTS = ROOT / "hyfreedp" / "experiments"
ALONE = "accounting_of_the_paper"  # one module
ORDER = (ALONE, "store", "data", "models", "tasks", "baselines", "runs", "tables", "studies", "audits")
ALLOWED = {room: set(ORDER[: place + 1]) for place, room in enumerate(ORDER)}
ALLOWED |= {
    "baselines": {"baselines"},
    "book": {"book", "store", "runs"},
    "benchmark": {"benchmark", "store", "data", "models", "tasks", "baselines", "runs", "tables"},
}


def imported(path):
    """The rooms, and modules beside them, that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "hyfreedp.experiments":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hyfreedp.experiments."):
            yield node.module.split(".")[2]
        elif isinstance(node, ast.Import):
            yield from (name.name.split(".")[2] for name in node.names if name.name.startswith("hyfreedp.experiments."))


def test_every_module_is_in_a_room_and_every_room_has_a_place():
    assert {path.name for path in EXPERIMENTS.glob("*.py")} == {"__init__.py", "__main__.py", f"{ALONE}.py"}
    assert {path.parent.name for path in EXPERIMENTS.glob("*/__init__.py")} | {ALONE} == set(ALLOWED)


@together("room", ALLOWED)
def test_a_room_imports_only_those_before_it(room):
    for path in (EXPERIMENTS / room).rglob("*.py"):
        assert set(imported(path)) <= ALLOWED[room], path.name


def test_the_core_imports_no_experiment():
    for path in (ROOT / "hyfreedp").rglob("*.py"):
        if EXPERIMENTS not in path.parents:
            assert not set(imported(path)), path


def test_figures_load_neither_scikit_learn_nor_half_of_the_experiments():
    """What ``plots`` needs of the experiments, and none of the libraries that only data and models need."""
    code = "import sys; from hyfreedp.experiments.store import plots; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert not {"sklearn", "timm", "torchvision", "transformers"} & set(loaded)
    assert len([name for name in loaded if name.startswith("hyfreedp.experiments")]) < 10
