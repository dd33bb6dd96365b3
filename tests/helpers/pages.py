"""The programs in our own documentation."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def programs(page, section=""):
    """The blocks of Python of a page, or of the section under this heading, up to the next."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
