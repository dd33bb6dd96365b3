"""Nothing that is read is run: no evaluated text, no pickled code, no unchecked download, no word to the network."""

import ast
from functools import cache

from hyfreedp.experiments.data import image_files
from hyfreedp.experiments.store.paths import ROOT

# Where a call that could run code does not: file, call, why.
EVALUATING = {"eval", "exec", "compile", "__import__", "pickle.load", "pickle.loads", "yaml.load", "marshal.loads"}
NETWORK = {"urllib", "requests", "http", "socket", "ftplib", "smtplib", "httpx", "aiohttp"}


@cache
def files():
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in (ROOT / "hyfreedp").rglob("*.py")
    }


def calls():
    for file, tree in files().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield file, ast.unparse(node.func), node


def test_every_load_takes_tensors_and_plain_values_only():
    """NumPy's default refuses pickled objects; nobody asks for them."""
    loads = [(file, node) for file, name, node in calls() if name == "torch.load"]
    assert loads
    for file, node in loads:
        assert "weights_only=True" in [ast.unparse(word) for word in node.keywords], file
    for file, name, node in calls():
        assert not (name == "np.load" and any(word.arg == "allow_pickle" for word in node.keywords)), file


def test_no_text_is_evaluated():
    assert not {(file, name) for file, name, _ in calls() if name in EVALUATING}


def test_no_module_imports_the_network():
    for file, tree in files().items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not NETWORK & {name.split(".")[0] for name in names}, file


def test_every_download_has_a_checksum():
    downloads = [(file, node) for file, name, node in calls() if name.endswith(("download_url", "extract_archive"))]
    assert downloads
    for file, node in downloads:
        assert "md5" in [word.arg for word in node.keywords], file
    sums = [*image_files._GTSRB_ARCHIVES.values(), image_files._TINY_IMAGENET_MD5]
    assert all(len(bytes.fromhex(text)) == 16 for text in sums)
