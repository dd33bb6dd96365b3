"""A reader of HTML pages for tests."""

from html.parser import HTMLParser

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
