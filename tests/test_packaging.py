"""The modules keep to the layout and the requirements they promise; nothing is loaded or downloaded unchecked."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hyfreedp"
REQUIRED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
CORE = {canonicalize_name(Requirement(text).name).replace("-", "_") for text in REQUIRED}

# From the ground up: a module may import from the lines before its own, from nothing else on its line or after it.
LAYERS = [
    {"errors", "checks", "data", "processes", "pytorch.devices", "pytorch.layers", "schedule"},
    {"noise", "accounting", "data.batches", "processes.group", "pytorch", "pytorch.wrapper", "pytorch.base_optimizer"},
    {"privatize", "auditing", "curvefit", "preset", "noise.random_states", "gradients.guard", "pytorch.records"},
    {"gradients.functorch", "gradients.per_sample", "gradients.clipping", "gradients.validate"},
    {"gradients.operations", "gradients.pieces", "gradients.tables", "gradients.batch_norm"},
    {"gradients.isolation"},
    {"gradients.mapped"},
    {"gradients.rules", "gradients.compositions", "processes.same_records", "pytorch.checkpoint"},
    {"gradients." + name for name in ("convolution", "functions", "questions", "recurrent")},
    {"gradients.engine"},
    {"gradients", "step_batch"},
    {"gradients.plain", "learner", "data.sampling"},
    {"line_search", "look", "reference", "run_state", "statement"},
    {"optimizer", "__main__"},
    {"engine", "plots"},
    {"__init__"},
    {"experiments", "integrations"},
]
BUDGET = 9169  # lines of the core, all but the experiments; it may fall
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("check", [["check"], ["format", "--check"]], ids=["lint", "format"])
def test_ruff_finds_nothing(check):
    command = [sys.executable, "-m", "ruff", *check, "--no-cache", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_core_stays_within_its_budget_of_lines():
    """A library that can be read. Where it is exceeded, delete."""
    core = [path for path in MODULES if not path.is_relative_to(PACKAGE / "experiments")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in core) <= BUDGET


def component(path):
    """The name in LAYERS of a file: its own, or its folder's, directly below hyfreedp/."""
    return named(".".join(path.relative_to(PACKAGE).parts).removesuffix(".py").removesuffix(".__init__"))


def named(module):
    return next((part for part in (".".join(module.split(".")[:2]), module.split(".")[0]) if part in LEVEL), module)


def imports(path):
    """Absolute dotted names of what a file imports, wherever in the file it does."""
    folder = ("hyfreedp", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            # "from hyfreedp import optimizer" imports a module, "from hyfreedp import PrivacyEngine" the front page
            package = module in ("hyfreedp", "hyfreedp.experiments", "hyfreedp.gradients")
            yield from (f"{module}.{alias.name}" if package else module for alias in node.names)


def imported_component(name):
    found = named(name.removeprefix("hyfreedp").removeprefix("."))
    return found if found in LEVEL else "__init__"


@pytest.mark.parametrize("path", MODULES)
def test_module_keeps_to_the_layout(path):
    me = component(path)
    assert me in LEVEL, f"give {me} its place in LAYERS"

    for name in imports(path):
        top = name.split(".")[0]
        if top == "hyfreedp":
            other = imported_component(name)
            assert other == me or LEVEL[other] < LEVEL[me], f"{me} imports {name}, which is not below it"
        elif me not in ("experiments", "integrations", "plots"):
            known = CORE | {"triton"} | sys.stdlib_module_names  # torch brings triton where there is a GPU for it
            assert top in known, f"{top} is not a requirement of the core"


EXPERIMENTS = PACKAGE / "experiments"
ALONE = "accounting_of_the_paper"  # one module
ROOMS = (ALONE, "store", "data", "models", "tasks", "baselines", "runs", "tables", "studies", "audits")
ALLOWED = {room: set(ROOMS[: place + 1]) for place, room in enumerate(ROOMS)}
ALLOWED |= {
    "baselines": {"baselines"},
    "book": {"book", "store", "runs", "studies"},  # answers of exercises
    "benchmark": {"benchmark", "store", "data", "models", "tasks", "baselines", "runs", "tables"},
}


def test_every_module_of_the_experiments_is_in_a_room_and_every_room_has_a_place():
    assert {path.name for path in EXPERIMENTS.glob("*.py")} == {"__init__.py", "__main__.py", f"{ALONE}.py"}
    assert {path.parent.name for path in EXPERIMENTS.glob("*/__init__.py")} | {ALONE} == set(ALLOWED)


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_those_before_it(room):
    for path in (EXPERIMENTS / room).rglob("*.py"):
        names = (name.split(".") for name in imports(path))
        assert {name[2] for name in names if name[:2] == ["hyfreedp", "experiments"]} <= ALLOWED[room], path.name


NODES = [(path.name, node) for path in MODULES for node in ast.walk(ast.parse(path.read_text()))]
CALLS = [(name, node) for name, node in NODES if isinstance(node, ast.Call)]


@pytest.mark.parametrize(
    ("function", "argument"), [("torch.load", "weights_only=True"), (("download_url", "extract_archive"), "md5")]
)
def test_nothing_is_loaded_or_downloaded_unchecked(function, argument):
    """NumPy's default refuses pickled objects; nobody asks for them."""
    found = [(file, node) for file, node in CALLS if ast.unparse(node.func).endswith(function)]
    for file, node in found:
        assert any(ast.unparse(word).startswith(argument) for word in node.keywords), file
    assert found and not [file for file, node in CALLS if "allow_pickle" in [word.arg for word in node.keywords]]


HEAVY = "dp_accounting scipy.stats torch.distributed.fsdp peft lightning pandas seaborn papermill timm torchvision"


@pytest.mark.whole
def test_the_core_loads_nothing_heavy_and_runs_without_opacus_and_autodp():
    """In a process to which neither is installed: None in ``sys.modules`` is how Python says so."""
    script = f"""
import sys
sys.modules["opacus"] = sys.modules["autodp"] = None
import hyfreedp.integrations
print([name for name in "{HEAVY} transformers".split() if name in sys.modules])
import torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
data, model = TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,))), torch.nn.Linear(3, 2)
_, optimizer, loader = hyfreedp.PrivacyEngine(seed=0).make_private_with_epsilon(
    module=model, optimizer=torch.optim.AdamW(model.parameters()), data_loader=DataLoader(data, batch_size=8),
    target_epsilon=3.0, target_delta=1e-3, steps=2)
for batch in loader:
    optimizer.step(lambda batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch)
print(optimizer.steps_left, optimizer.split.guarantee, optimizer.epsilon_spent() <= 3)
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert told.splitlines() == ["[]", "0 True True"]
