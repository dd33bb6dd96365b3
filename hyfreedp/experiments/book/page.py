"""report.html: every figure and table of a batch on one page that needs nothing but itself."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd

from hyfreedp.experiments.book import notebooks
from hyfreedp.experiments.book.committed import Comparison
from hyfreedp.experiments.book.jobs import Origin, Outcome
from hyfreedp.experiments.store.provenance import commit, environment

_NUMBER = ' class="number"'
_RUN = re.compile(r"(cell )?[0-9a-f]{16}")


def page(outcomes: Sequence[Outcome], profile: str, comparison: Comparison, origin: Origin) -> str:
    """The page as text: what each figure and table shows, the paper's claim, ours, and what made it.

    Args:
        outcomes: of the batch; the files that they made are read from their jobs' folder.
        comparison: of these files with the committed ones.
        origin: of the training runs behind them.
    """
    facts = {
        "Versions": escape(_versions(environment())),
        "Commit": escape(commit()),
        "Runs": _runs(origin),
        "Files": escape(str(comparison)),
    }
    failed = [_link(_anchor(outcome), outcome.job.name) for outcome in outcomes if outcome.status == "failed"]
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>hyfreedp, profile {escape(profile)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>hyfreedp: figures and tables, profile {escape(profile)}</h1>
<p>A reproduction of “Towards hyperparameter-free optimization with differential privacy” (Bu and Liu, ICLR 2025).
What the paper claims stands beside what was found here.</p>
{_definitions(facts)}
{f"<p><strong>Failed:</strong> {', '.join(failed)}</p>" if failed else ""}
</header>
<nav aria-labelledby="contents">
<h2 id="contents">Contents</h2>
<ul>
{"".join(map(_entry, outcomes))}</ul>
</nav>
<main>
{"".join(_section(outcome, origin) for outcome in outcomes)}</main>
</body>
</html>
"""


def _entry(outcome: Outcome) -> str:
    """A notebook and what it made, in the list of contents."""
    items = [f"<li>{_link(one.stem, one.stem)}: {escape(made['shows'])}</li>\n" for one, made in _descriptions(outcome)]
    inner = f"<ul>\n{''.join(items)}</ul>" if items else f"<p>{escape(outcome.status)}</p>"
    return f"<li>{_link(_anchor(outcome), notebooks.title(outcome.job.source))}\n{inner}</li>\n"


def _section(outcome: Outcome, origin: Origin) -> str:
    """A notebook: how it was executed, then its figures, tables and interactive pages."""
    job = outcome.job
    facts = {
        "Notebook": f"<code>{escape(job.name)}</code>",
        "Profile": escape(job.parameters["profile"]),
        "Command": f"<code>{escape(job.command)}</code>",
        "Execution": f"{escape(outcome.status)}, {outcome.seconds:.0f} s",
    }
    parts = [_article(path, made, outcome.made_with, origin) for path, made in _descriptions(outcome)]
    parts += [_embedded(outcome.job.output / name) for name in outcome.made if name.endswith(".html")]
    if outcome.error:
        parts.append(f'<pre tabindex="0">{escape(outcome.error)}</pre>\n')
    return f"""<section aria-labelledby="{_anchor(outcome)}">
<h2 id="{_anchor(outcome)}">{escape(notebooks.title(job.source))}</h2>
{_definitions(facts)}
{"".join(parts)}</section>
"""


def _article(path: Path, made: dict[str, Any], made_with: Mapping[str, str], origin: Origin) -> str:
    """One figure or table with its description, which ``plots.save`` wrote, and what it was made with.

    Args:
        path: of the description; the figure or table lies beside it.
    """
    name = path.stem
    facts = {"Paper": escape(made["claim"]) or "no such item", "Here": _list(made["summary"])}
    parameters = [f"{key} = {value}" for key, value in made["parameters"].items()]
    behind = {
        "Parameters": _list(parameters),
        "Inputs": _list(_inputs(made["inputs"], origin)),
        "Made with": escape(_versions(made_with)),
    }
    return f"""<article aria-labelledby="{escape(name)}">
<h3 id="{escape(name)}">{escape(name)}</h3>
{_image(path, made["shows"]) if "figure" in made else _table(path, made["shows"])}
{_definitions(facts)}
<details><summary>What made it</summary>
{_definitions(behind)}
</details>
</article>
"""


def _runs(origin: Origin) -> str:
    """What is read and what is fresh, and how some of what is read came out once more."""
    if not origin.committed:
        return escape(str(origin))
    return f"""{escape(str(origin))}.
<details><summary>What that means</summary>
<p>Records are read that were made with: {escape("; ".join(origin.made_with))}. Each time others of them are trained
again. "Equal" is said of runs whose every released number of every step is the recorded one, bit for bit. Noise
follows from the bits of what it hides, so that one sum that a processor or library rounds otherwise makes it other
noise; such a run ends as one with another seed would. It is accepted within the spread of seeds, and never called
equal.</p>
{_list(origin.again[1:])}
</details>"""


def _inputs(inputs: Sequence[str], origin: Origin) -> list[str]:
    """Inputs as they are, but runs as their numbers: read, and trained here."""
    keys = {name: name.removeprefix("cell ") for name in inputs if _RUN.fullmatch(name)}
    others = [name for name in inputs if name not in keys]
    if not keys:
        return others
    read = sum(key in origin.committed for key in keys.values())
    return [f"{len(keys)} runs: {read} read from committed records, {len(keys) - read} trained here", *others]


def _image(path: Path, shows: str) -> str:
    data = base64.b64encode(path.with_suffix(".png").read_bytes()).decode()
    return f"""<figure>
<img src="data:image/png;base64,{data}" alt="{escape(shows)}">
<figcaption>{escape(shows)}</figcaption>
</figure>"""


def _table(path: Path, shows: str) -> str:
    frame = pd.read_csv(path.with_suffix(".csv"), keep_default_na=False, na_values=[""])
    numeric = frame.select_dtypes("number").columns
    head = "".join(
        f'<th scope="col"{_NUMBER if column in numeric else ""}>{escape(str(column))}</th>' for column in frame.columns
    )
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in frame.itertuples(index=False, name=None))
    return f"""<p>{escape(shows)}</p>
<div class="scroll" role="region" aria-labelledby="{escape(path.stem)}" tabindex="0">
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}</tbody>
</table>
</div>"""


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"<td{_NUMBER}>{'' if math.isnan(value) else f'{value:.4g}'}</td>"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"<td{_NUMBER}>{value}</td>"
    return f"<td>{escape(str(value))}</td>"


def _embedded(path: Path) -> str:
    """An interactive page, in a frame that may run its scripts and reach nothing else."""
    name, text = path.name, path.read_text(encoding="utf-8")
    return f"""<article class="interactive" aria-labelledby="{escape(name)}">
<h3 id="{escape(name)}">{escape(name)}: interactive</h3>
<iframe title="{escape(name)}" sandbox="allow-scripts" loading="lazy" srcdoc="{escape(text)}"></iframe>
</article>
"""


def _descriptions(outcome: Outcome) -> list[tuple[Path, dict[str, Any]]]:
    """Path and content of the description of each figure and table; the one with the notebook's own name first."""
    paths = sorted(outcome.job.output / name for name in outcome.made if name.endswith(".json"))
    return [(path, json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def _versions(made_with: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in made_with.items())


def _anchor(outcome: Outcome) -> str:
    return f"notebook-{outcome.job.name}"


def _link(anchor: str, text: str) -> str:
    return f'<a href="#{escape(anchor)}">{escape(text)}</a>'


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _definitions(facts: dict[str, str]) -> str:
    """A description list; keys are plain text, values are HTML."""
    return "<dl>\n" + "".join(f"<dt>{escape(key)}</dt><dd>{value}</dd>\n" for key, value in facts.items()) + "</dl>"
