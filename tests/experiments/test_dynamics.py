"""Notebook 05: its runs differ in what they say, probe when and decide how they say, and its records make sense."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from cases import together
from matplotlib import pyplot as plt
from scipy import stats
from twins import adamw, make_model, make_private, searching

from hyfreedp.engine import PRESETS
from hyfreedp.experiments.baselines.line_search import LINE_SEARCH, StudiedRule
from hyfreedp.experiments.runs.cells import Spec, read_cell, read_steps, reader, run_cells
from hyfreedp.experiments.runs.methods import EXTENDED_GRID, METHODS
from hyfreedp.experiments.store.paths import RESULTS
from hyfreedp.experiments.store.plots import SERIES
from hyfreedp.experiments.studies import dynamics, dynamics_figures, fine_tuning, pure_noise
from hyfreedp.experiments.tables import small_tasks
from hyfreedp.experiments.tables.plan import Learner
from hyfreedp.step_rules import decay_factor

STEPS = 20
BASE = Spec(epsilon=3.0, steps=STEPS)
SHORT = [
    replace(BASE, method="line_search", interval=1),
    replace(BASE, method="line_search", interval=10),
    replace(BASE, method="line_search_gen"),
    replace(BASE, method="paper_literal", interval=1),
]

# -- the methods -------------------------------------------------------------------------------------------------------


def settings(method):
    return METHODS[method].settings


@together(("probe", "rule"), dynamics.RULES)
def test_runs_of_the_rules_differ_from_their_preset_in_the_rule_alone(probe, rule):
    preset = {"contrasts": LINE_SEARCH, "losses": PRESETS["paper"]}[probe]
    assert settings(dynamics.RULES[probe, rule]) == replace(preset, **searching(probe, rule))
    assert preset.probe == probe


def test_each_part_is_left_out_alone():
    assert [settings(method) for method in dynamics.PARTS.values()] == [
        LINE_SEARCH,
        replace(LINE_SEARCH, step_rule=StudiedRule(damping=False)),
        replace(LINE_SEARCH, warmup=0.0),
        replace(LINE_SEARCH, probe="losses"),
    ]


@together(("smoothing", "batch"), dynamics.SMOOTHINGS)
def test_runs_of_the_published_versions_differ_in_smoothing_and_batch_alone(smoothing, batch):
    method = dynamics.SMOOTHINGS[smoothing, batch]
    assert settings(method) == replace(PRESETS["paper"], smoothing=smoothing, probe_batch=batch)


@together(("rule", "threshold_rule"), dynamics.LOSS_THRESHOLDS)
def test_runs_of_the_threshold_rules_differ_in_these_alone(rule, threshold_rule):
    method = dynamics.LOSS_THRESHOLDS[rule, threshold_rule]
    assert settings(method) == replace(
        PRESETS["paper"], loss_threshold_rule=threshold_rule, **searching("losses", rule)
    )


def test_algorithm_1_as_printed_has_the_papers_rules():
    printed = replace(PRESETS["paper"], step_rule="literal", loss_threshold_rule="previous")
    assert settings("algorithm1") == printed and printed.initial_learning_rate == 1e-4


@together("damping", [True, False])
def test_damping_sets_what_the_rule_aims_for_and_how_far_the_probe_looks(damping):
    """On an exact parabola without noise: sqrt(m) b/a and eta / m with damping, b/a and eta without."""
    model = make_model()
    _, optimizer, _ = make_private(
        model,
        adamw(model),
        preset=LINE_SEARCH,
        step_rule=StudiedRule(damping=damping),
        target_epsilon=math.inf,
        initial_learning_rate=0.1,
    )
    probe = optimizer.rate_learner
    m = math.sqrt((1 - 0.9) / (1 + 0.9)) if damping else 1.0
    assert probe.distance == pytest.approx(0.1 / m)
    slope, curvature = 0.3, 2.0
    x = torch.tensor([probe.distance, 0.0, -probe.distance], dtype=torch.float64)
    losses = (5 - slope * x + curvature * x**2 / 2)[:, None]
    result = probe.update(losses, 0.0, 1.0, None, held=False)
    assert result.eta_next == pytest.approx(math.sqrt(m) * slope / curvature)


# -- what the runs do --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Per-step rows of four short runs."""
    folder = tmp_path_factory.mktemp("cells")
    run_cells(SHORT, folder)
    return dynamics.steps_of(SHORT, folder)


def probed_steps(rows, spec):
    run = dynamics.of_spec(rows, spec)
    assert run.step.tolist() == list(range(STEPS))
    return run.step[run.slope.notna()].tolist()


def test_probes_come_when_the_plan_says(short):
    """K = 1 at every step; else at every step of the warm-up, the first tenth, and then at every K-th from its end."""
    assert probed_steps(short, SHORT[0]) == list(range(STEPS))
    assert probed_steps(short, SHORT[1]) == [0, 1, 2, 12]
    assert probed_steps(short, SHORT[2]) == [0, 1, 2, 7, 12, 17]


@pytest.mark.parametrize("spec", SHORT, ids=lambda spec: f"{spec.method}-{spec.interval}")
def test_every_rate_is_the_one_last_decided_times_the_decay(short, spec):
    run = dynamics.of_spec(short, spec)
    preset = settings(spec.method)
    decided = run.eta_next.ffill()
    decay = [decay_factor(step, STEPS, preset.decay, preset.decay_start) for step in run.step]
    np.testing.assert_allclose(run.eta, decided * decay, rtol=1e-9)
    probes = run[run.slope.notna()]
    assert probes.eta_probed.iloc[0] == spec.learning_rate
    np.testing.assert_allclose(probes.eta_probed.iloc[1:], probes.eta_next.iloc[:-1], rtol=1e-12)


def test_literal_takes_b_over_a_as_released(short):
    """From the very first step, sign and all."""
    run = dynamics.of_spec(short, SHORT[3])
    np.testing.assert_allclose(run.eta_next, run.slope / run.curvature, rtol=1e-12)
    assert (run.eta < 0).any()


def test_gen_stays_within_its_clamp(short):
    probes = dynamics.of_spec(short, SHORT[2]).dropna(subset="slope")
    growth = probes.eta_next / probes.eta_probed
    assert growth.between(0.55 * (1 - 1e-9), 1.9 * (1 + 1e-9)).all()
    rejected = ~probes.accepted.astype(bool)
    assert (rejected == ~((probes.slope > 0) & (probes.curvature > 0))).all()
    assert (growth[rejected] == 1).all()


def test_losses_and_contrasts_show_their_own_thresholds(short):
    contrasts, losses = (dynamics.of_spec(short, spec).dropna(subset="slope") for spec in (SHORT[0], SHORT[3]))
    assert contrasts[["difference_threshold", "bend_threshold"]].notna().all(axis=None)
    assert contrasts[["loss_threshold", "private_loss"]].isna().all(axis=None)
    assert losses[["loss_threshold", "private_loss"]].notna().all(axis=None)


def test_nothing_that_is_not_private_is_recorded(short):
    assert not [name for name in short if name.startswith("not_private")]


def test_test_loss_and_accuracy_are_measured_together_at_regular_steps(short):
    for spec in SHORT:
        run = dynamics.of_spec(short, spec)
        assert run.step[run.test_accuracy.notna()].tolist() == [4, 9, 14, 19]
        assert (run.test_loss.notna() == run.test_accuracy.notna()).all()


# -- tables ------------------------------------------------------------------------------------------------------------


def made_rows():
    """Two runs of four steps, probing at 0 and 2."""
    rows = []
    for seed, threshold in ((0, [1.0, 4.0]), (1, [3.0, 2.0])):
        for step in range(4):
            row = {name: getattr(replace(BASE, seed=seed), name) for name in dynamics.SPEC_COLUMNS}
            row |= {"step": step, "eta": 0.1 * (step + 1) * (seed + 1)}
            if step % 2 == 0:
                row |= {
                    "slope": 3.0 if step else -1.0,
                    "slope_std": 1.0,
                    "accepted": bool(step),
                    "reason": "b/a above the range, clamped" if step else "rejected: b and a are not both positive",
                    "eta_next": -0.5 if seed and step else 0.25,
                    "loss_threshold": threshold[step // 2],
                }
            rows.append(row)
    return pd.DataFrame(rows)


def test_bands_are_median_and_range_where_there_are_values():
    band = dynamics.bands(made_rows(), "loss_threshold")
    assert band.index.tolist() == [0, 2]
    assert band.loc[2].to_dict() == {"median": 3.0, "low": 2.0, "high": 4.0}


def test_probe_behaviour_counts_each_run():
    table = dynamics.probe_behaviour(made_rows()).set_index("seed")
    assert table.probes.tolist() == [2, 2]
    assert table.rejected.tolist() == table.clamped.tolist() == table.clear.tolist() == [0.5, 0.5]
    assert table.negative.tolist() == [0.0, 0.5]
    assert table.smallest_eta.tolist() == [0.25, 0.25] and table.largest_eta.tolist() == [0.25, 0.5]
    assert table.last_loss_threshold.tolist() == [4.0, 2.0]


def test_peaks_say_where_and_what_is_left():
    table = dynamics.peaks(made_rows(), "loss_threshold").set_index("seed")
    assert table.loc[0, ["peak", "peak_at", "last"]].tolist() == [4.0, 1.0, 1.0]
    assert table.loc[1, ["peak", "peak_at", "last"]].tolist() == [3.0, 0.0, pytest.approx(2 / 3)]


def test_the_tuned_rate_is_the_grids_best_at_the_nearest_epsilon(tmp_path):
    """On a task without recorded runs the whole grid is trained, once per rate."""
    rows = pd.DataFrame(
        [
            ("digits", 1.0, "linear", 0.05, 0.9),
            ("digits", 3.0, "linear", 0.01, 0.7),
            ("digits", 3.0, "constant", 0.02, 0.8),
            ("digits", 3.0, "robust", 1e-4, 0.99),
            ("classification", 3.0, "linear", 0.001, 0.95),
        ],
        columns=["task", "epsilon", "method", "learning_rate", "accuracy"],
    )
    tuned = dynamics.tuned_by_hand(replace(BASE, epsilon=4.0), rows, tmp_path)
    assert tuned == replace(BASE, epsilon=4.0, method="constant", learning_rate=0.02)


def test_a_task_without_records_gets_its_grid_trained_once_per_rate(tmp_path, monkeypatch):
    trained = []

    def run(specs, folder, description):
        trained.extend(specs)
        names = ("epsilon_spent", "guarantee", "final_eta", "seconds")
        return [
            {"spec": vars(spec), "accuracy": float(spec.learning_rate == 5e-3 and spec.method == "linear")}
            | dict.fromkeys(names, 0.0)
            for spec in trained
        ]

    monkeypatch.setattr(dynamics, "run_cells", run)
    recorded = pd.DataFrame({"task": ["classification"]})
    assert dynamics.tuned_by_hand(BASE, recorded, tmp_path) == replace(BASE, method="linear", learning_rate=5e-3)
    assert len(trained) == 2 * len(EXTENDED_GRID) and {spec.steps for spec in trained} == {STEPS}


def test_the_table_of_accuracies_has_mean_and_deviation():
    rows = pd.DataFrame(
        {"method": ["line_search"] * 4, "epsilon": [1.0, 1.0, 8.0, 8.0], "accuracy": [0.5, 0.7, 0.9, 0.9]}
    )
    table = dynamics.accuracy_table(rows)
    assert table.columns.tolist() == [8.0, 1.0]
    assert table.loc["contrasts, posterior (line_search)"].tolist() == ["90.0 ± 0.0", "60.0 ± 14.1"]
    assert dynamics.accuracy_table(rows, ["paper"]).empty
    assert dynamics.spread(pd.Series([12.34])) == "12.3"  # one run has no deviation


def test_bands_draw_what_they_are_given_and_nothing_where_there_is_none():
    _, axis = plt.subplots()
    dynamics_figures.draw_band(axis, made_rows(), "loss_threshold", SERIES[0], "R")
    dynamics_figures.draw_band(axis, made_rows().assign(test_loss=math.nan), "test_loss", SERIES[1])
    (line,) = axis.lines
    assert line.get_xdata().tolist() == [0, 2] and line.get_ydata().tolist() == [2.0, 3.0]
    plt.close()


# -- arithmetic and pure noise -----------------------------------------------------------------------------------------


def test_rule_gen_grows_by_a_tenth_per_probe_at_most():
    assert dynamics.probes_to_reach(0.01, start=1e-4) == math.ceil(math.log(100) / math.log(1.1)) == 49
    assert dynamics.probes_to_reach(1e-4, start=1e-4) == 0


def test_pure_noise_moves_every_rule_as_the_notebook_derives():
    """Of three losses the noise of b is h / sqrt(12) times that of a, and b/a is that times a Cauchy variable."""
    probes, start = 20, 1e-3
    table = pure_noise.drift(probes=probes, start=start, runs=400, seed=1).set_index("rule")
    steps = np.log(table["median"] / start) / probes
    # log |Cauchy| has mean 0 and variance pi^2/4; the median of 400 sums of 20 within four standard errors.
    error = 1.25 * math.pi / 2 * math.sqrt(probes / 400) / probes
    assert abs(steps["literal"] - math.log(1 / math.sqrt(12))) < 4 * error
    # gen: a quarter is accepted; below half the rate with probability 2/3, above twice with 1 - 2/pi arctan(2 sqrt 12).
    above = 1 - 2 / math.pi * math.atan(2 * math.sqrt(12))
    down, up = math.log(0.95), math.log(1.1)
    assert 0.25 * (2 / 3 * down + above * up) - 0.003 < steps["gen"] < 0
    assert steps["gen, 0.9 of the new rate"] == pytest.approx(10 * steps["gen"], rel=0.5)
    assert -0.2 < steps["posterior"] < -0.03
    assert table["median"]["anchored"] == pytest.approx(0.02, rel=0.3)


# -- the records that are committed ------------------------------------------------------------------------------------


def recorded(name):
    return pd.read_csv(RESULTS / "laptop" / f"{name}.csv")


def welch(higher, lower):
    """One-sided p-value against "higher is not above lower": small when it clearly is below."""
    if np.ptp([*higher, *lower]) == 0:
        return 1.0
    return stats.ttest_ind(higher, lower, equal_var=False, alternative="less").pvalue


@together("name", ["accuracy", "ablation"])
def test_less_privacy_is_never_worse_beyond_noise(name):
    """Every method at eps = 8 against eps = 1, at a false-alarm rate of 0.1 % over all of them together."""
    rows = recorded(name)
    groups = list(rows.groupby(["task", "method", "learning_rate"]))
    for key, runs in groups:
        loose, tight = (runs.accuracy[runs.epsilon == value] for value in (8.0, 1.0))
        assert len(loose) == len(tight) == 5
        assert welch(loose, tight) > 1e-3 / len(groups), key


def test_the_ablation_has_every_method_at_every_budget_once():
    rows = recorded("ablation")
    assert len(rows) == len(dynamics.ABLATION) * len(small_tasks.EPSILONS) * 5
    assert not rows.duplicated(["method", "epsilon", "seed"]).any()
    assert (rows.epsilon_spent <= rows.epsilon).all() and rows.guarantee.all()


def test_the_ablation_agrees_with_the_accuracy_study_where_both_have_a_run():
    keys = ["task", "method", "epsilon", "seed", "learning_rate", "interval"]
    both = recorded("ablation").merge(recorded("accuracy"), on=keys, suffixes=("", "_study"))
    assert len(both) == 2 * len(small_tasks.EPSILONS) * 5
    np.testing.assert_allclose(both.accuracy, both.accuracy_study, atol=0.02)  # exact on the machine that made both


def test_the_ablation_shows_what_the_notebook_says():
    """At eps = 3: on the losses signs are coin flips and gen cannot climb; on the contrasts every rule learns."""
    rows = recorded("ablation")
    mean = rows[rows.epsilon == 3.0].groupby("method").mean(numeric_only=True)
    for method in ("paper_literal", "algorithm1"):
        assert 0.3 < mean.negative[method] < 0.7 and mean.accuracy[method] < 0.25
    whole = mean.accuracy["line_search"]
    assert mean.negative["paper"] == 0 and mean.largest_eta["paper"] < 5e-4 and mean.accuracy["paper"] < 0.25
    # gen keeps nine tenths of its rate, as its authors' package does, and has 29 probes to climb from 1e-4.
    assert mean.accuracy["line_search_gen"] < mean.accuracy["line_search_literal"] < whole
    assert mean.accuracy["line_search_losses"] < 0.35 < mean.accuracy["line_search_cold"] < whole
    for method in ("paper_anchored", "paper_anchored_previous"):  # the loss falls, and R_l to its floor
        assert mean.last_loss_threshold[method] == pytest.approx(0.1, abs=0.01)
    assert mean.last_loss_threshold["paper_previous"] < math.log(10) < mean.last_loss_threshold["paper"]


# -- real images -------------------------------------------------------------------------------------------------------


@pytest.mark.whole
def test_the_record_of_fine_tuning_holds_the_steps_of_its_runs(tmp_path):
    """On a stand-in: digits instead of CIFAR-10, the same series."""
    learner = Learner("digits", "mlp", "full", 12)
    scale = replace(fine_tuning.SCALE, learners=(learner,), epsilons=(0.2,), seeds=1)  # soon calibrated
    table = tmp_path / "fine_tuning.csv"
    rows = fine_tuning.record(tmp_path / "cells", table, scale=scale)
    names = [f"HyFreeDP, paper, K = {interval}" for interval in dynamics.INTERVALS]
    assert list(dict.fromkeys(rows.series)) == [*names, *fine_tuning.NAMES.values()]
    for series, specs in fine_tuning.runs(scale, reader(tmp_path / "cells")).items():
        steps = read_steps(specs[0], tmp_path / "cells")
        found = rows[rows.series == series]
        assert found.step.tolist() == [0, 1, 5, 6, 10, 11]  # every fifth, and where it is evaluated
        assert found.eta.tolist() == steps[steps.step.isin(found.step)].eta.tolist()
        assert found.test_accuracy.dropna().iloc[-1] == read_cell(specs[0], tmp_path / "cells")["accuracy"]
    pd.testing.assert_frame_equal(pd.read_csv(table), rows, check_dtype=False)
    waiting = fine_tuning.runs(scale, lambda spec: None)
    assert "tuned by hand" not in waiting and len(waiting) == 4
