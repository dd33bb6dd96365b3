"""The step rule's targets: what is run, that validation data choose, and how a table reads."""

import math

import pandas as pd
import pytest

from hyfreedp.experiments.runs.methods import EXTENDED_GRID
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.tables import targets
from hyfreedp.experiments.tables.targets import GROUPS, Group, finals, gaps, markdown, places, rivals, searches

SMALL = Group("digits", steps=(6,), epsilons=(3.0,), seeds=2)


def test_every_place_is_searched_by_sixteen_runs_on_validation_data():
    for group in GROUPS:
        for place in places(group):
            runs = searches(place)
            assert len(set(runs)) == 16 and {run.evaluation for run in runs} == {"validation"}
            assert {run.seed for run in runs} == {0} and {run.epsilon for run in runs} == {place.epsilon}
            assert {(run.task, run.model, run.tuning, run.base, run.steps) for run in runs} == {
                (place.task, place.model, place.tuning, place.base, place.steps)
            }
    assert len({place for group in GROUPS for place in places(group)}) == sum(len(list(places(g))) for g in GROUPS)


def test_the_best_is_chosen_by_validation_and_tested_as_often_as_its_rivals():
    (place,) = places(SMALL)
    scores = {spec: {"accuracy": 0.1, "loss": 2.0} for spec in searches(place)}
    better = [spec for spec in scores if spec.learning_rate == 5e-3]
    scores |= {spec: {"accuracy": 0.5, "loss": loss} for spec, loss in zip(better, (1.0, 0.5), strict=True)}
    runs = finals(SMALL, place, scores.get)
    assert list(runs) == ["best", *(name for name, *_ in rivals(SMALL))]
    assert {(run.method, run.learning_rate) for run in runs["best"]} == {("linear", 5e-3)}  # the lower loss of the two
    for specs in runs.values():
        assert [spec.seed for spec in specs] == [0, 1] and {spec.evaluation for spec in specs} == {"test"}
    assert runs["robust"][0] == place


def test_a_search_for_sgd_has_rates_of_its_own_and_no_constant_of_adamws():
    group = Group("digits", base="sgd", epsilons=(3.0,))
    (place,) = places(group)
    assert {run.learning_rate for run in searches(place)} == set(targets.SGD_GRID) != set(EXTENDED_GRID)
    assert [name for name, *_ in rivals(group)] == ["robust", "line_search"]


def test_a_lora_line_search_starts_where_the_papers_does():
    assert ("line_search", "line_search", 1e-3) in rivals(Group("reports", "llama_sentences", "lora"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A table of real, short runs, made in two parts."""
    folder, patch = tmp_path_factory.mktemp("targets"), pytest.MonkeyPatch()
    table = folder / "targets.csv"
    with patch.context() as at:
        at.setattr(targets, "EXTENDED_GRID", (1e-3, 2e-2))
        at.setattr(targets, "GROUPS", (SMALL,))
        first = targets.run(folder, table)
        at.setattr(targets, "GROUPS", (Group("classification", steps=(6,), epsilons=(3.0,), seeds=1),))
        both = targets.run(folder, table)
        again = targets.run(folder, table)
    return first, both, again, pd.read_csv(table)


@pytest.mark.whole
def test_a_table_grows_by_groups_and_is_the_same_when_made_again(made):
    first, both, again, written = made
    assert len(first) == 8 and len(both) == 12 and set(both.name) == {"best", "robust", "line_search", "0.02, linear"}
    pd.testing.assert_frame_equal(again, both)
    columns = [*targets.PLACE, "name", "seed", "accuracy"]
    pd.testing.assert_frame_equal(written[columns], both[columns].astype(written[columns].dtypes))
    assert both[["accuracy", "loss", "version_torch"]].notna().all(axis=None) and (both.epsilon_spent <= 3).all()


def test_data_that_cannot_be_had_leave_their_group_out_by_name(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HYFREEDP_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setattr(targets, "GROUPS", (Group("cifar10_some", "mlp32"),))
    assert targets.run(tmp_path, tmp_path / "table.csv").empty
    assert "left out: cifar10_some: HYFREEDP_DATA must name a folder" in capsys.readouterr().out


def rows(task="digits", **accuracies):
    place = {"task": task, "model": "m", "tuning": "full", "base": "adamw", "steps": 10, "epsilon": 1.0}
    return pd.DataFrame(
        [
            place
            | {"name": name, "seed": seed, "accuracy": value, "loss": 1.0 + (name == "robust") * math.log(1.1)}
            | {"method": "linear", "learning_rate": 0.02}
            for name, values in accuracies.items()
            for seed, value in enumerate(values)
        ]
    )


def test_gaps_are_means_over_seeds_in_points_with_their_standard_error():
    table = gaps(rows(best=[0.8, 0.9], robust=[0.8, 0.82], line_search=[0.5, 0.5], **{"0.02, linear": [0.7, 0.9]}))
    (row,) = table.to_dict("records")
    assert (row["best"], row["schedule"]) == (pytest.approx(85), "0.02, linear")
    assert (row["robust"], row["line_search"], row["0.02, linear"]) == pytest.approx((-4, -35, -5))
    assert row["error"] == pytest.approx(math.hypot(5, 1)) and math.isnan(row["perplexity"])


def test_texts_are_compared_by_perplexity_too():
    frame = rows("restaurants", best=[0.5], robust=[0.45], line_search=[0.1], **{"0.02, linear": [0.2]})
    assert gaps(frame).perplexity.item() == pytest.approx(10)
    line = markdown(pd.concat([frame, frame.assign(seed=1)])).splitlines()[-1]  # one seed has no error
    assert line == (
        "| restaurants, m | adamw | 10 | 1 | 50.0 (0.02, linear) | -5.0 ± 0.0; perplexity +10 % | -30.0 | -40.0 |"
    )


def test_a_place_is_a_run_of_the_default_preset():
    assert next(places(SMALL)) == Spec("digits", "robust", 3.0, steps=6)
