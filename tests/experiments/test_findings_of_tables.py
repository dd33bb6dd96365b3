"""Findings, verdicts, statistics, and the overview: what is said and drawn is what the tables and the method say."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from cases import together
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Annotation
from scipy import stats

from hyfreedp.experiments.book import overview
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.store import verdicts
from hyfreedp.experiments.store.verdicts import Verdict, scoreboard, verdict
from hyfreedp.experiments.tables import first_look
from hyfreedp.experiments.tables.looks import profile, stratified_bootstrap

pytestmark = pytest.mark.usefixtures("figure_style")


@pytest.fixture
def study():
    """The best rate is 0.02 with decay at epsilon 3, another one at epsilon 1; every method gains 2 points by seed."""
    accuracies = {("linear", 0.02): 0.8, ("constant", 0.01): 0.7, ("linear", 1e-4): 0.2}
    learned = {("robust", 1e-4): 0.82, ("paper", 1e-4): 0.1}
    rows = [
        {"task": task, "epsilon": epsilon, "method": method, "learning_rate": rate, "accuracy": accuracy + 0.02 * seed}
        for task in ("digits", "classification")
        for epsilon in (1.0, 3.0)
        for (method, rate), accuracy in (accuracies | learned).items()
        for seed in (0, 1)
    ]
    table = pd.DataFrame(rows)
    at_one = (table.epsilon == 1.0) & (table.method == "constant")
    table.loc[at_one, "accuracy"] += 0.2
    return table


def test_best_and_worst_are_those_of_the_nearest_budget(study):
    found = first_look.choices(study, epsilon=2.5, interval=5, steps=10)
    assert (found["best"].spec.method, found["best"].spec.learning_rate) == ("linear", 0.02)
    assert found["worst"].title == "grid's worst: 0.0001, linear"
    assert first_look.choices(study, epsilon=1.0, interval=5, steps=None)["best"].spec.method == "constant"
    assert found["paper"].spec == Spec(method="paper", epsilon=2.5, interval=5, steps=10)


def test_costs_are_those_of_the_run_but_for_the_grid(study):
    found = first_look.choices(study, epsilon=3.0, interval=5, steps=10)
    measured = {"epsilon_spent": 3.0, "guarantee": True, "final_eta": 0.1, "seconds": 1.0}
    records = [{"spec": {"seed": seed}, "accuracy": 0.5 + 0.1 * seed} | measured for _ in found for seed in (0, 1)]
    table = first_look.cost_table(records, found, 2, 11.0)
    assert table.accuracy.tolist() == pytest.approx([55] * 4) and table.sd.iloc[0] == pytest.approx(10 / math.sqrt(2))
    assert table.epsilon_with_tuning.tolist() == [3, 3, 11, 11]
    told = first_look.cost_findings(table)
    assert told[0] == ("HyFreeDP, preset robust: accuracy 55.0 ± 7.1 %, epsilon 3.00 for the run, 3.00 with tuning")
    alone = first_look.cost_table(records[::2], found, 1, 11.0)
    assert "accuracy 50.0 %" in first_look.cost_findings(alone)[0]


def test_they_are_written_down_and_collected(workspace, capsys):
    made = [
        Verdict("A", "reproduced", "one in two"),
        Verdict('"B", b', "fails here", "3.1 > 3"),
        Verdict("C", "not shown", "one", "ours"),
    ]
    verdict("01_second", made, parameters={"profile": "smoke"}, inputs=["cell 0"])
    described = json.loads((workspace.output("smoke") / "01_second_verdict.json").read_text())
    assert described["summary"] == ["A: reproduced (one in two)", '"B", b: fails here (3.1 > 3)', "C: not shown (one)"]
    assert "**reproduced**. One in two." in capsys.readouterr().out or described["table"] == "01_second_verdict"
    assert len(scoreboard(["../notebooks/01_second.ipynb"], "ours").splitlines()) == 2, (
        "a verdict that is not committed"
    )
    workspace.output("smoke").rename(workspace.figures)
    board = scoreboard(["../notebooks/00_first.ipynb", "../notebooks/01_second.ipynb"], "the paper's").splitlines()
    assert board[2:] == [
        "| [01](../notebooks/01_second.ipynb) | A | **reproduced** | one in two |",
        '|  | "B", b | **fails here** | 3.1 > 3 |',
    ]
    apart = scoreboard(["../notebooks/00_first.ipynb", "../notebooks/01_second.ipynb"], "ours").splitlines()
    assert apart[2:] == ["| [01](../notebooks/01_second.ipynb) | C | **not shown** | one |"]


def test_a_learned_rate_is_judged_by_its_places():
    gaps = {"paper": (-9, -8, -8.5), "robust": (-3, 0, 1)}
    rows = [{"method": method, "gap": gap} for method, of in gaps.items() for gap in of]
    found = first_look.verdicts(pd.DataFrame(rows))
    assert [(one.outcome, one.whose) for one in found] == [("fails here", "the paper's"), ("not shown", "ours")]
    assert found[1].number.startswith("-0.7 points to the best of 16 runs (-3.0 at worst), mean of 3 places, 95 %")


@together(
    ("values", "mark", "outcome"),
    [
        ([0.1, 0.2, 0.3], 0.0, "not shown"),  # 0.2 +- 4.3 * 0.058: from -0.05
        ([0.1, 0.2, 0.3], -0.1, "reproduced"),
        ([0.1, 0.2, 0.3], 0.5, "fails here"),
        ([0.1], 0.0, "not shown"),
    ],
)
def test_a_claim_about_a_mean_is_judged_by_its_whole_interval(values, mark, outcome):
    found, words = verdicts.over_places(values, mark)
    assert found == outcome and words.startswith(f"mean of {len(values)} place")
    assert ("4 places would decide" in words) == (len(values) > 1 and outcome == "not shown")


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9), st.floats(-5, 5))
def test_so_many_places_decide_as_are_said_to(values, mark):
    needed = verdicts.would_decide(values, mark)
    if needed is not None:
        spread = np.std(values, ddof=1)
        halves = [stats.t.ppf(0.975, n - 1) * spread / math.sqrt(n) for n in (needed, max(2, needed - 1))]
        assert halves[0] < abs(np.mean(values) - mark) and (needed == 2 or abs(np.mean(values) - mark) <= halves[1])


def test_a_profile_is_the_share_that_reaches_a_mark():
    values = np.array([-2.0, -1.0, 0.0, 3.0])
    assert profile(values, [-5, -1, 0.5, 4]).tolist() == [1, 0.75, 0.25, 0]
    marks = np.linspace(-3, 4, 29)
    assert np.allclose(profile(values, marks), 1 - stats.ecdf(values).cdf.evaluate(marks - 1e-9))


def test_seeds_are_drawn_within_their_place_alone():
    """Places far apart: their spread is no part of the interval of the mean, as the closed form has it."""
    rng = np.random.default_rng(1)
    places = [level + rng.standard_normal(5) for level in (0, 100, 1000)]
    low, high = stratified_bootstrap(places, np.mean, draws=4000)
    exact = np.sqrt(sum(np.var(runs) for runs in places) / 5) / 3  # of a mean of means, by resampling
    assert (high - low) / 2 == pytest.approx(stats.norm.ppf(0.975) * exact, rel=0.06)
    assert low < np.mean(places) < high


def test_no_arrow_of_the_overview_crosses_from_raw_to_private():
    """Black boxes stand on the border: what enters one is raw, what leaves it is not."""
    axes = overview.draw().axes[0]
    black = [
        patch.get_x() < overview.BORDER < patch.get_x() + patch.get_width()
        for patch in axes.patches
        if isinstance(patch, FancyBboxPatch) and patch.get_facecolor() == to_rgba(overview.NOISE)
    ]
    assert sum(black) == 3  # gradient, losses, votes; the fourth is the legend's
    arrows = [text for text in axes.texts if isinstance(text, Annotation)]
    assert len(arrows) > 15
    assert not any(arrow.xyann[0] < overview.BORDER < arrow.xy[0] for arrow in arrows)
