"""The table ``docs/models.md`` of the findings."""

from __future__ import annotations

from typing import Any

from hyfreedp.experiments.store.paths import ROOT

FINDINGS = ROOT / "tools" / "models" / "findings.json"
PAGE = ROOT / "docs" / "models.md"


def page(found: dict[str, dict[str, Any]]) -> str:
    return ""
