"""The record of version 0.1.0 on probabilities after private training, as docs/results.md prints it.

What serves was chosen on validation data, then trained on all of the training part and tested, with seeds that chose
nothing.
"""

from __future__ import annotations

import pandas as pd

TITLES = {
    "coin": "labels 70 to 30",
    "minority": "minority of 10 %",
    "flipped": "digits, 20 % of labels wrong",
    "digits": "digits",
    "classification": "make_classification",
    "tuned": "digits, pre-trained ViT",
}
WAYS = {
    ("default", "none"): "as it is",
    ("default", "slopes"): "a temperature by slopes",
    ("default", "votes"): "a temperature by votes",
    ("stability 0.1", "none"): "`AutomaticClipping(0.1)`",
    ("stability 1", "none"): "`AutomaticClipping(1.0)`",
    ("stability 10", "none"): "`AutomaticClipping(10.0)`",
    ("flat 0.1", "none"): "`AbadiClipping(0.1)`",
    ("flat 1", "none"): "`AbadiClipping(1.0)`",
    ("flat 10", "none"): "`AbadiClipping(10.0)`",
    ("smoothing 0.1", "none"): "`label_smoothing=0.1`",
    ("decay 1", "none"): "`weight_decay=1.0`",
    ("flat 1", "slopes"): "`AbadiClipping(1.0)`, and a temperature by slopes",
    ("smoothing 0.1", "slopes"): "`label_smoothing=0.1`, and a temperature by slopes",
}
WAY, PLACE = ["setting", "fit"], ["problem", "epsilon"]


def markdown(rows: pd.DataFrame) -> str:
    """Every way at every problem, as docs/results.md prints it: accuracy (percent), log loss (nats), calibration error.

    They are means over budgets and seeds, tested with preset robust. Behind them are the points of accuracy that each
    way gains on the preset as it is, paired by seed: the mean over the places, which are problems and budgets, and the
    least of them, with its standard error over the seeds.
    """
    here = rows[(rows.evaluation == "test") & (rows.preset == "robust")]
    lines = [
        f"| Preset robust | {' | '.join(TITLES.values())} | points of accuracy: mean, worst place |",
        "| --- |" + " --- |" * (len(TITLES) + 1),
    ]
    means = here.groupby([*WAY, "problem"])[["accuracy", "log_loss", "calibration_error"]].mean()
    table = 100 * here.pivot_table(index=[*PLACE, "seed"], columns=WAY, values="accuracy")
    gains = table.sub(table["default", "none"], axis=0).groupby(PLACE)
    gained, errors = gains.mean(), gains.sem()
    for way in (way for way in WAYS if way in table):
        cells = [
            f"{100 * found.accuracy:.1f} / {found.log_loss:.2f} / {found.calibration_error:.2f}"
            for found in (means.loc[(*way, name)] for name in TITLES)
        ]
        gain, error = gained[way], errors[way][gained[way].idxmin()]
        points = f"{gain.mean():+.1f}, {gain.min():+.1f} ± {error:.1f}"
        lines.append(f"| {WAYS[way]} | {' | '.join(cells)} | {points if way[0] != 'default' else 'none'} |")
    base = here.groupby("problem").base_rate_loss.first()
    lines.append(f"| shares of the classes | {' | '.join(f'{base[name]:.2f}' for name in TITLES)} | |")
    return "\n".join(lines)
