"""Verdicts: the rule by which a claim is judged, and the board."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hyfreedp.experiments.benchmark import efficiency
from hyfreedp.experiments.store import plots, verdicts
from hyfreedp.experiments.store.paths import RESULTS, ROOT
from hyfreedp.experiments.store.verdicts import Verdict
from hyfreedp.experiments.studies import document_runs
from hyfreedp.experiments.tables import control, image_classification, language_generation, looks, paper, small_tasks


@pytest.mark.parametrize(
    ("values", "mark", "outcome"),
    [
        ([0.1, 0.2, 0.3], 0.0, "not shown"),  # 0.2 +- 4.3 * 0.058: from -0.05
        ([0.1, 0.2, 0.3], -0.1, "reproduced"),
        ([0.1, 0.2, 0.3], 0.5, "fails here"),
        ([0.1], 0.0, "not shown"),
    ],
)
def test_a_claim_about_a_mean_is_judged_by_its_whole_interval(values, mark, outcome):
    found, words = verdicts.over_data_sets(pd.Series(values, list("abc")[: len(values)]), mark)
    assert found == outcome and words.startswith("a +0.1")
    assert ("; 4 would decide" in words) == (len(values) > 1 and outcome == "not shown")


@settings(max_examples=20)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.integers(1, 9), st.floats(-5, 5))
def test_more_places_of_a_data_set_say_nothing_new(values, places, mark):
    """Else one could prove anything by more budgets of the same images."""
    once = pd.Series(values, [str(place) for place in range(len(values))])
    again = pd.concat([once, *[once[:1]] * places])
    assert verdicts.over_data_sets(again, mark)[0] == verdicts.over_data_sets(once, mark)[0]


@settings(max_examples=20)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9), st.floats(-5, 5))
def test_so_many_places_decide_as_are_said_to(values, mark):
    needed = verdicts.would_decide(values, mark)
    if needed is not None:
        spread = np.std(values, ddof=1)
        halves = [stats.t.ppf(0.975, n - 1) * spread / math.sqrt(n) for n in (needed, max(3, needed - 1))]
        assert halves[0] < abs(np.mean(values) - mark) and (needed == 3 or abs(np.mean(values) - mark) <= halves[1])


def test_figures_are_of_the_records_of_today():
    found = {one.stem: json.loads(one.read_text()).get("records", {}) for one in (ROOT / "figures").glob("[0-9]*.json")}
    assert sum(map(bool, found.values())) > 10
    for name, records in found.items():
        stale = [record for record, digest in records.items() if plots.digest(ROOT / record) != digest]
        assert not stale, f"execute notebook {name[:2]} again: it was made of other {stale}"


def recomputed():
    """The verdicts that follow from committed tables alone, by notebook."""
    profiles = ("desktop", "laptop")
    tables = {name: pd.read_csv(RESULTS / name / "image_classification.csv").assign(profile=name) for name in profiles}
    rows = pd.concat([image_classification.whole_places(tables["desktop"]), tables["laptop"]], ignore_index=True)
    found = pd.concat([control.compared(name) for name in profiles], ignore_index=True)
    decided = image_classification.judged(rows)
    yield "06_image_classification", [*decided, *control.cases(found, rows), control.against_ours(found, rows)]
    texts, curves = (pd.read_csv(RESULTS / "desktop" / f"{name}.csv") for name in ("language_generation", "documents"))
    speeches = document_runs.judged(document_runs.rates(curves), "sentences of speeches")
    yield "07_language_generation", language_generation.judged(texts.dropna(subset="accuracy")) + speeches
    times = pd.read_csv(RESULTS / "laptop" / "efficiency.csv")
    yield "08_efficiency", efficiency.judged(times, efficiency.beside_paper(paper.load("eff"), times, "cpu"))
    small = small_tasks.judged(small_tasks.gaps(pd.read_csv(RESULTS / "laptop" / "accuracy.csv")))
    today = pd.read_csv(RESULTS / "laptop" / "looks.csv")
    yield "12_first_run", small + looks.judged(looks.gaps(looks.differences(looks.places(), today)))


def test_the_committed_verdicts_follow_from_the_records():
    for name, decided in recomputed():
        committed = pd.read_csv(ROOT / "figures" / f"{name}_verdict.csv", keep_default_na=False)
        assert [Verdict(**row) for row in committed.to_dict("records")] == decided, name


@pytest.mark.parametrize(
    ("quartiles", "outcome"),
    [
        ([(1.05, 1.06), (1.01, 1.069)], "reproduced"),
        ([(1.05, 1.06), (1.06, 1.09)], "not shown"),
        ([(1.06, 1.09), (1.08, 1.09)], "fails here"),
    ],
)
def test_a_time_is_beyond_a_mark_by_both_of_its_quartiles(quartiles, outcome):
    assert efficiency.by_quartiles(pd.DataFrame(quartiles, columns=["x_q1", "x_q3"]), "x", 1.07) == outcome


def test_three_data_sets_can_decide_and_two_cannot_however_alike():
    """So two more sets of texts would decide the claims of Tab. gpt2 without a change of code."""
    shares = pd.Series([0.30, 0.30, 0.32], ["E2E", "other", "E2E"])
    assert verdicts.by_data_sets(shares, most=0.5) == "not shown"
    assert verdicts.would_decide([0.30, 0.31], 0.5) == 3
    assert verdicts.by_data_sets(shares.set_axis(["E2E", "other", "third"]), most=0.5) == "reproduced"
    runs = pd.DataFrame({"epsilon": 8.0, "seed": [0, 0, 1], "row": ["grid", "a", "a"], "BLEU": [0.4, 0.3, 0.5]})
    assert language_generation.shares(runs).loc["a", 8.0] == pytest.approx(0.75), "by seeds that both have"
