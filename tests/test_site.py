"""The site: every page builds without a warning, has no dead link, and loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from html import unescape
from urllib.parse import unquote

import pytest

pytest.importorskip("sphinx", reason="the extra docs is not installed")

from hyfreedp.experiments.store.paths import ROOT

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the site as ``make docs`` makes it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", "-b", "html", ".", str(folder)]
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}  # Sphinx's own warnings are those that count
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_links_and_pictures_of_the_landing_page_and_of_notebooks_exist(built):
    for path in (built / "index.html", *built.glob("notebooks/**/[0-9]*.html")):
        page = path.read_text(encoding="utf-8")
        for target in set(re.findall(r'(?:href|src)="([^":]+)"', page)):
            name, _, anchor = target.partition("#")
            text = (path.parent / unquote(name.partition("?")[0])).read_bytes() if name else page.encode()
            assert not anchor or f'id="{unescape(anchor)}"'.encode() in text, f"{path.name}: {target}"


def test_pages_load_nothing_from_elsewhere(built):
    for path in built.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="([^"]+)"|<link[^>]*\shref="([^"]+)"', text)
        assert not [one for pair in loaded for one in pair if "//" in one], path.name
