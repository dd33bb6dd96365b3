"""Readers of pages for tests: of HTML, and of the programs in our own documentation."""

import re
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def programs(page, section=""):
    """The blocks of Python of a page, or of the section under this heading, up to the next."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


VOID = {"meta", "input", "img", "br", "link", "hr"}


class Page(HTMLParser):
    """Elements with attributes, text, scripts, and whether every element is closed in turn."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text, self.scripts = [], [], "", []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if "script" in self.open:
            self.scripts.append(data)
        elif "style" not in self.open:
            self.text += data

    def find(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def all(self, tag, attribute):
        return [found[attribute] for found in self.find(tag) if attribute in found]
