"""The page for users of Opacus is true: both scripts run as written, and its names exist."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import opacus
import pytest

from hyfreedp import PrivacyEngine
from hyfreedp.preset import PresetFields

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "from-opacus.md").read_text(encoding="utf-8")
SCRIPTS = dict(zip(("opacus", "hyfreedp"), re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL), strict=True))
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
FIELDS = set(PresetFields.__annotations__)


@pytest.mark.parametrize("library", SCRIPTS)
def test_the_script_runs_as_written(library, tmp_path):
    """Each spends the budget that it asked for, learns, and leaves its checkpoint."""
    code = SCRIPTS[library]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    epsilon, accuracy = map(float, re.fullmatch(r"epsilon ([\d.]+), accuracy ([\d.]+)\n", done.stdout).groups())
    assert 2.9 <= epsilon <= 3.0 and accuracy > 0.6  # a third would be chance
    assert (tmp_path / "run.pt").stat().st_size > 0
    assert f"from {library} import PrivacyEngine" in code


def test_the_scripts_differ_only_where_the_page_says():
    """Data, model, call and epilogue are the same lines."""
    theirs, ours = (code.splitlines() for code in SCRIPTS.values())
    only_theirs = [line.strip() for line in theirs if line not in ours]
    assert only_theirs == [
        "from opacus import PrivacyEngine",
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # to be tuned",
        "max_grad_norm=1.0,  # to be tuned",
        "for inputs, labels in loader:",
        "optimizer.zero_grad()",
        "loss = F.cross_entropy(model(inputs), labels)",
        "loss.backward()",
        "optimizer.step()",
    ]


def test_the_table_names_what_exists():
    """Every keyword of a call, on either side, is an argument of what is called."""
    rows = [re.split(r" \| ", line.strip("| ")) for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(rows) > 15 and all(len(row) == 2 for row in rows)
    checked = 0
    for row in rows:
        for engine, more, cell in zip((opacus.PrivacyEngine, PrivacyEngine), (set(), FIELDS), row, strict=True):
            for text in re.findall(r"`((?:PrivacyEngine|make_private\w*|engine\.\w+_checkpoint)\(.*?\))`", cell):
                call = ast.parse(text, mode="eval").body
                name = ast.unparse(call.func).removeprefix("engine.")
                called = engine if name == "PrivacyEngine" else getattr(engine, name)
                known = {*inspect.signature(called).parameters} | more
                assert {keyword.arg for keyword in call.keywords} <= known, text
                checked += 1
    assert checked >= 10


def test_the_readme_links_the_page():
    assert "(docs/from-opacus.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
