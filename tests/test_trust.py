"""What is loaded is tensors and plain values, what is downloaded has a checksum; ruff refuses the rest."""

import ast

import pytest

from hyfreedp.experiments.store.paths import ROOT

CALLS = [
    (path.name, node)
    for path in (ROOT / "hyfreedp").rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Call)
]


@pytest.mark.parametrize(
    ("function", "argument"),
    [("torch.load", "weights_only=True"), (("download_url", "extract_archive"), "md5")],
)
def test_nothing_is_loaded_or_downloaded_unchecked(function, argument):
    """NumPy's default refuses pickled objects; nobody asks for them."""
    found = [(file, node) for file, node in CALLS if ast.unparse(node.func).endswith(function)]
    for file, node in found:
        assert any(ast.unparse(word).startswith(argument) for word in node.keywords), file
    assert found and not [file for file, node in CALLS if "allow_pickle" in [word.arg for word in node.keywords]]
