"""The site's own parts, a Sphinx extension: formulas as MathML, folded answers, and pages made of what notebooks wrote.

Formulas are translated when the site is built, so that it needs neither network nor script to show them.
``docs/conf.py`` names this module; the extra ``docs`` installs what it needs.
"""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from hyfreedp.experiments.book import notebooks
from hyfreedp.experiments.store.paths import workspace

_log = logging.getLogger(__name__)


class Gallery(SphinxDirective):
    """Every committed figure beside what the paper claims there, notebook by notebook; links are relative to docs/."""

    def run(self) -> list[nodes.Node]:
        here, parts = workspace(), []
        for source in notebooks.sources():
            parts.append(f"## {notebooks.title(source)}\n\n[Notebook]({notebooks.page(source, here.root / 'docs')})")
            for path in sorted(here.figures.glob(f"{source.stem}*.json")):
                made = json.loads(path.read_text(encoding="utf-8"))
                if "figure" in made:
                    shows, claim = _plain(made["shows"]), _plain(made["claim"]) or "*no such item*"
                    parts.append(f"### {path.stem}\n\n![{shows}](../figures/{path.stem}.png)")
                    parts.append(f"{shows}\n\n**The paper.** {claim}")
        return self.parse_text_to_nodes("\n\n".join(parts), allow_section_headings=True)


def _plain(text: str) -> str:
    """Text in which Markdown finds no markup."""
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>#|$~^" else letter for letter in text)


class Folded(SphinxTransform):
    """Sections with the heading "Answer" become folds, and leave the table of contents, which would be full of them."""

    default_priority = 500

    def apply(self, **_: Any) -> None:
        for section in list(self.document.findall(nodes.section)):
            if section[0].astext() == notebooks.ANSWER.strip("# "):
                opening = nodes.raw("", "<details><summary>Answer</summary>", format="html")
                section.replace_self([opening, *section[1:], nodes.raw("", "</details>", format="html")])


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(mathml(node.astext(), node, block=False))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    text = mathml(node.astext(), node, block=True)
    self.body.append(f'<div class="math" tabindex="0">{text}</div>\n')
    raise nodes.SkipNode


def mathml(tex: str, node: nodes.Node, *, block: bool) -> str:
    """A formula as MathML; one that cannot be translated is a warning, and shown as it is."""
    try:
        text = convert(tex.strip(), display="block" if block else "inline")
    except Exception as error:  # the translator has errors of many kinds
        _log.warning("the formula %r cannot be translated: %s", tex, error, location=node)
        return f"<code>{escape(tex)}</code>"
    if unknown := re.findall(r"\\\w+", text):  # which it leaves as they are
        _log.warning("the formula %r has unknown commands: %s", tex, ", ".join(unknown), location=node)
    return text


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("gallery", Gallery)
    app.add_transform(Folded)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
