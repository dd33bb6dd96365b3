"""Figures of notebooks 00, 06, 07 and 09: what is drawn is what the tables say, and axes have units."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from artists import bars, line
from cases import together

from hyfreedp import calibrate_noise
from hyfreedp import epsilon as epsilon_of
from hyfreedp.experiments.book import overview
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.tables import (
    first_look,
    image_classification,
    image_classification_figures,
    language_generation,
    language_generation_figures,
    rate_map,
    small_tasks,
    tuning_budget,
    tuning_budget_figures,
)
from hyfreedp.experiments.tables.plan import ROWS, Learner, Scale, table
from hyfreedp.votes import vote_steps

pytestmark = pytest.mark.usefixtures("figure_style")


# -- 00: start here ----------------------------------------------------------------------------------------------------


@pytest.fixture
def study():
    """The best rate is 0.02 with decay at epsilon 3, another one at epsilon 1; every method gains 2 points by seed."""
    accuracies = {("linear", 0.02): 0.8, ("constant", 0.01): 0.7, ("linear", 1e-4): 0.2}
    learned = {("robust", 1e-4): 0.82, ("line_search", 1e-4): 0.5, ("line_search", 1e-2): 0.6, ("paper", 1e-4): 0.1}
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


def test_a_grid_costs_the_composition_of_its_runs():
    plan = {"target_epsilon": 1.0, "target_delta": 1e-4, "sample_rate": 0.1, "probe": "none", "accountant": "rdp"}
    one = calibrate_noise(steps=10, **plan)
    all_steps = replace(one, steps=40)
    assert first_look.grid_epsilon(one, 4) == epsilon_of(all_steps, target_delta=1e-4) > one.epsilon


def test_digits_stand_under_their_labels():
    images = torch.arange(640.0).reshape(10, 64)
    figure = first_look.draw_digits(images, torch.arange(10))
    assert [axis.get_title() for axis in figure.axes] == [str(label) for label in range(10)]
    assert np.asarray(figure.axes[3].images[0].get_array()).ravel().tolist() == images[3].tolist()


@pytest.fixture
def history():
    """Two seeds of two steps of every choice; robust votes, paper probes."""
    rows = []
    for name in ("robust", "paper", "best", "worst"):
        for seed in (0, 1):
            for step in (0, 1):
                row = {"choice": name, "seed": seed, "step": step, "eta": 0.1 + seed, "test_accuracy": 0.5 + 0.1 * step}
                if name == "robust":
                    row |= {"margin": 0.5 - step, "margin_std": 0.05, "needed": 0.2, "lost": step == 1}
                if name == "paper":
                    row |= {"private_loss": 2.0 + seed, "loss_threshold": 3.0, "slope": -1.0, "slope_std": 2.0}
                rows.append(row)
    return pd.DataFrame(rows).astype({"lost": object})


def test_the_first_figure_shows_means_noise_and_votes(study, history):
    found = first_look.choices(study, epsilon=3.0, interval=5, steps=10)
    rate, accuracy, loss, votes = first_look.draw_runs(history, found, sigma_loss=50.0).axes
    assert line(rate, "HyFreeDP, preset paper")[1] == pytest.approx([0.6, 0.6])
    assert line(accuracy, found["best"].title)[1] == pytest.approx([50, 60])
    (container,) = loss.containers
    assert container.lines[0].get_ydata().tolist() == [2.0, 2.0]  # of the first seed alone
    segment = container.lines[2][0].get_segments()[0]
    assert segment[1, 1] - segment[0, 1] == pytest.approx(2 * 3.0 * 50 / 500)  # R_l sigma_l / B to either side
    x, margin, low, high = bars(votes, "lost: back, and brake")
    assert margin.tolist() == [-0.5, -0.5] and high[:, 1] - low[:, 1] == pytest.approx([0.1, 0.1])
    assert x == pytest.approx([1 - 0.01, 1 + 0.01])
    assert (loss.get_ylabel(), accuracy.get_ylabel()) == ("private mean loss (nats)", "test accuracy (%)")
    robust, paper = first_look.findings(history)
    (*_, start) = first_look.findings(history.assign(loss_threshold=2.5))
    assert start.startswith("Its first released loss is 2.50 where R_l is still 2.5: the losses are above it")
    assert "2 of its 4 votes are lost" in robust and "between -0.50 and +0.50" in robust
    assert "0.50 times the standard deviation" in paper


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


def test_gaps_are_to_the_grids_best(study):
    compared = small_tasks.gaps(study)
    figure = first_look.draw_gaps(compared)
    axis = figure.axes[0]
    _, gap, low, high = bars(axis, "robust")
    assert gap == pytest.approx([82 - 90, 82 - 80])  # the best at epsilon 1 is another
    assert (high[:, 1] - low[:, 1])[0] == pytest.approx(2 * 2 / math.sqrt(2))
    assert axis.get_ylabel().startswith("accuracy minus grid's best\n(points")
    robust, former = first_look.gap_findings(compared)
    assert "from -8.0 to +2.0 points" in robust and "by 10.0 to 10.0 points" in former
    told = first_look.gap_list(compared)
    assert len(told) == 5 and told[0].startswith("robust: digits (1,500 images) -8.0 / +2.0, make_classification")
    assert told[0].endswith("points to the grid's best at epsilon 1 / 3")


def test_the_overview_tells_when_the_presets_ask():
    paper, robust = overview.findings(100)
    assert "every 5 steps" in paper and "eta from 0.03 on" in robust  # 0.3 / sqrt(100)
    assert f"at steps {', '.join(map(str, vote_steps(100)))} of 100" in robust


# -- 06: image classification ------------------------------------------------------------------------------------------

SCALE = Scale((Learner("cifar10", "vit32_tiny_imagenet", "full", 5),), epsilons=(1.0, math.inf), seeds=2)
LEVELS = {row: level for level, row in enumerate(ROWS)}


@pytest.fixture
def numbers():
    """Every row at its own level, half a point more with the second seed."""
    rows = table(SCALE, lambda _: None)
    level = rows.row.map(LEVELS)
    levels = {"accuracy": 0.5 + level / 100 + 0.005 * rows.seed, "validation_accuracy": 0.6 + level / 100}
    return rows.assign(profile="gpu", **levels)


def test_all_methods_have_their_range_and_are_filled_if_covered(numbers):
    numbers.loc[numbers.row == "prodigy", "accuracy"] = 0.1
    figure = image_classification_figures.draw_distances(numbers)
    assert [axis.get_ylabel() for axis in figure.axes] == [r"$\varepsilon$ = 1", r"$\varepsilon$ = ∞"]
    axis = figure.axes[0]
    names = [text.get_text() for text in axis.get_yticklabels()]
    assert names == [row.title for row in ROWS.values()][::-1]
    chosen = image_classification.best_grid(numbers).row.iloc[0]
    *methods, zero = axis.lines
    assert zero.get_xdata() == pytest.approx([0, 0])
    edge = methods.pop(2 * names.index(ROWS["prodigy"].title))
    assert edge.get_xdata() == [-image_classification_figures.FAR] and edge.get_marker() == "<"
    assert [text.get_text() for text in axis.texts] == [f"{10 - 50.25 - LEVELS[chosen]:+.0f}"]
    near = [name for name in list(ROWS)[::-1] if name != "prodigy"]
    for name, span, dot in zip(near, methods[::2], methods[1::2], strict=True):
        behind = LEVELS[name] - LEVELS[chosen]
        assert span.get_xdata() == pytest.approx([behind - 0.25, behind + 0.25])
        assert dot.get_xdata() == pytest.approx([behind])
        assert (dot.get_markerfacecolor() != "white") == ROWS[name].covered
    assert axis.get_title().endswith(f"best grid search {50.25 + LEVELS[chosen]:.1f} %")
    assert figure.axes[1].get_xlabel() == "points to the best grid search"


def test_methods_are_compared_with_the_best_grid_at_private_places_alone(numbers):
    compared = image_classification_figures.comparisons(numbers)
    rank = image_classification.ranking(image_classification.summarise(numbers))
    chosen = image_classification.best_grid(numbers).row.iloc[0]
    assert compared["mean"].to_dict() == pytest.approx({name: LEVELS[name] - LEVELS[chosen] for name in ROWS})
    assert (compared.pairs == 2).all()
    told = image_classification_figures.accuracy_findings(compared, rank)
    robust = LEVELS["hyfreedp_robust"] - LEVELS[chosen]
    assert told[0].startswith(
        f"{ROWS['hyfreedp_robust'].title}: {robust:+.1f} points to the best grid search (mean of 1"
    )
    assert told[-1].startswith("Mean rank over 1 private places")
    assert image_classification_figures.rank_table(rank).method.iloc[0] == ROWS[rank.row.iloc[0]].title
    nothing = image_classification_figures.comparisons(numbers.assign(accuracy=math.nan))
    assert "no numbers yet" in image_classification_figures.accuracy_findings(nothing, rank.head(0))[0]


def test_missing_numbers_are_counted(numbers):
    assert image_classification_figures.missing_text(numbers, "smoke") == f"All {len(numbers)} numbers are there."
    numbers.loc[:2, "accuracy"] = math.nan
    text = image_classification_figures.missing_text(numbers, "smoke")
    assert text.startswith(f"**3 of {len(numbers)} numbers are missing.**") and text.endswith("--profile smoke`")


def test_tables_of_both_tunings_are_one(numbers):
    summary = image_classification.summarise(numbers)
    together = image_classification_figures.together(summary)
    assert together.columns.tolist()[:3] == ["tuning", "epsilon", "method"] and together.shape[1] == 3 + 11
    texts, _ = image_classification.beside_paper(summary, "full")
    full = together[together.tuning == "full"]
    assert full.iloc[:, -1].tolist() == texts.iloc[:, -1].tolist()
    assert len(image_classification_figures.row_table()) == len(ROWS)


def test_verdicts_are_printed_with_their_intervals(numbers):
    judged = image_classification.judged(numbers)
    told = image_classification_figures.judged_table(judged)
    line = told.set_index("claim").loc["HyFreeDP outperforms Prodigy"]
    assert line["ours"] == f"{LEVELS['hyfreedp_paper'] - LEVELS['prodigy']:+.1f}"
    assert line["95 % interval"] == "–" and line.verdict == "not shown"  # a single private place
    assert told["paper's tables"].str.match(r"[+-]\d+\.\d|–").all()


def test_rates_are_medians_on_a_logarithmic_scale():
    learner = ("digits", "mlp", "full")
    names = ["task", "model", "tuning"]
    steps = pd.DataFrame({"step": [0, 0, 0, 1, 1, 1], "eta": [1e-6, 1e-5, 1e-4, 0.1, 0.2, 0.6]})
    steps = steps.assign(row="prodigy", epsilon=1.0, **dict(zip(names, learner, strict=True)))
    (axis,) = image_classification_figures.draw_rates(steps, [learner], [1.0]).axes
    assert line(axis, ROWS["prodigy"].title)[1] == pytest.approx([1e-5, 0.2])
    assert axis.get_yscale() == "log" and axis.get_ylabel() == "learning rate,\n$\\varepsilon$ = 1"


def test_the_collapse_is_counted_by_verdict():
    outcome = pd.DataFrame(
        {
            "tuning": "full",
            "epsilon": [1.0, 3.0, math.inf],
            "verdict": ["never left the start", "too low", "near"],
            "accuracy": [10.0, 20.0, 50.0],
            "grid_accuracy": [60.0, 60.0, 55.0],
            "row": "prodigy",
        }
    )
    private, open_ = image_classification_figures.collapse_findings(outcome)
    assert private == (
        "All parameters trained, with privacy: the rate of Prodigy never left the start in 1, too low in 1 of 2 "
        "places, -45 points to the extended grid search"
    )
    assert open_.endswith(", without: the rate of Prodigy near in 1 of 1 places, -5 points to the extended grid search")
    assert set(image_classification_figures.titled(outcome).row) == {ROWS["prodigy"].title}


def test_gaps_are_drawn_with_their_range_over_places():
    gaps = pd.DataFrame(
        {
            "source": ["the paper", "desktop", "desktop"],
            "tuning": "bitfit",
            "epsilon": [1.0, 1.0, 8.0],
            "row": "hyfreedp_robust",
            "gap": [1.0, -2.0, -4.0],
            "low": [0.0, -3.0, -7.0],
            "high": [2.0, -1.0, -3.0],
        }
    )
    (axis,) = image_classification_figures.draw_gaps(gaps).axes
    spans, dots = axis.lines[:-1:2], axis.lines[1:-1:2]
    assert [list(span.get_xdata()) for span in spans] == [[0.0, 2.0], [-7.0, -1.0]]
    assert [dot.get_xdata()[0] for dot in dots] == [1.0, -3.0]
    assert axis.get_xlabel().startswith("points") and axis.get_title() == "BitFit"
    (text,) = image_classification_figures.gap_findings(gaps)
    means = "+1.0 (the paper), -3.0 (ours, real images)"
    assert text == f"BitFit, {ROWS['hyfreedp_robust'].title}: {means} points to the grid search"


def test_optimism_is_of_the_grid_searches_alone(numbers):
    assert image_classification_figures.optimism(numbers)["mean"].to_numpy() == pytest.approx(10 - 0.25)


# -- 07: language ------------------------------------------------------------------------------------------------------

METHODS = ["grid", "hyfreedp_robust"]


@pytest.fixture
def scores():
    places = {"task": "t", "model": "m", "tuning": "full", "count": 2}
    rows = [
        places
        | {"epsilon": epsilon, "row": row, "metric": metric, "mean": level + epsilon / 10, "std": 0.05}
        | {"low": level + epsilon / 10 - 0.02, "high": level + epsilon / 10 + 0.03}
        for epsilon in (3.0, 8.0)
        for level, row in enumerate(METHODS, start=1)
        for metric in (*language_generation.METRICS, "perplexity")
    ]
    return pd.DataFrame(rows)


def test_metrics_are_drawn_with_their_ranges(scores):
    figure = language_generation_figures.draw_metrics(scores, METHODS, [3.0, 8.0])
    assert [axis.get_title() for axis in figure.axes] == [*language_generation.METRICS, "perplexity"]
    x, y, low, high = bars(figure.axes[0], r"$\varepsilon$ = 8")
    assert x == pytest.approx([1.8, 2.8]) and y == pytest.approx([0.1, 1.1])
    assert low[:, 0] == pytest.approx([1.78, 2.78]) and high[:, 0] == pytest.approx([1.83, 2.83])
    assert figure.axes[-1].get_xlabel() == "per token, lower is better" and figure.axes[-1].get_xscale() == "log"
    start = scores[(scores.row == "grid") & (scores.epsilon == 3.0)].assign(row="start", epsilon=0.0, mean=0.25)
    start.loc[start.metric == "perplexity", "mean"] = 40.0
    told = language_generation_figures.metric_findings(pd.concat([start, scores]), METHODS, [3.0, 5.0])
    grid, robust = (ROWS[name].title for name in METHODS)
    assert told == [
        "before private training the perplexity is 40 and BLEU 0.250",
        f"epsilon = 3: lowest perplexity {grid} (1.30), highest {robust} (2.3); best BLEU {robust} (2.300)",
        f"epsilon = 3: {robust} has BLEU 2.300 and perplexity 2.30, the uncounted grid search 1.300 and 1.30",
    ]
    without = scores[scores.metric != "METEOR"]
    missing = pd.concat([without, scores[scores.metric == "METEOR"].assign(mean=math.nan)])
    assert "Java" in language_generation_figures.metric_findings(missing, METHODS, [3.0])[-1]
    axis = language_generation_figures.draw_metrics(pd.concat([start, scores]), METHODS, [3.0, 8.0]).axes[0]
    (line,) = [line for line in axis.lines if line.get_label() == "public start"]
    assert list(line.get_xdata()) == [0.25, 0.25]


def test_the_verdict_counts_the_runs_that_it_rests_on(scores):
    (found,) = language_generation_figures.verdicts(scores, [3.0, 8.0, 1.0], "E2E")
    assert found.claim.endswith("(preset robust, ours)")
    assert found.outcome == "reproduced"
    assert found.number == "177% and 156% of the grid search's BLEU on E2E at epsilon = 3 and 8, 2 runs each"
    one = (scores.row == "hyfreedp_robust") & (scores.epsilon == 8.0)
    scores.loc[one, "count"] = 1
    scores.loc[(scores.row == "grid") & (scores.epsilon == 3.0), "mean"] = math.nan
    (found,) = language_generation_figures.verdicts(scores, [3.0, 8.0], "E2E")
    assert found.number == "156% of the grid search's BLEU on E2E at epsilon = 8, 1 to 2 runs each"
    assert language_generation_figures.verdicts(scores, [3.0], "E2E") == []


def test_a_search_that_ends_at_an_edge_says_so():
    rows = pd.DataFrame({"epsilon": 3.0, "row": ["grid", "grid_extended", "prodigy"], "learning_rate": [5e-3, 1e-2, 1]})
    edge, inside = language_generation_figures.edge_findings(rows)
    assert edge.endswith("chose 0.005, the largest of its rates: a wider grid may do better")
    assert inside.endswith("chose 0.01")


def test_runs_that_write_worse_than_their_start_are_named():
    rows = pd.DataFrame(
        [
            *(("start", 0.0, 0.3), ("grid", 3.0, 0.4), ("grid", 3.0, 0.31)),
            *(("reference", 3.0, 0.1), ("reference", 3.0, 0.25), ("reference", 8.0, math.nan)),
            *(("hyfreedp_robust", 8.0, 0.0), ("hyfreedp_robust", 8.0, 0.4)),
        ],
        columns=["row", "epsilon", "BLEU"],
    )
    assert language_generation_figures.below_start_findings(rows) == [
        "epsilon = 3: 2 of 2 runs of 0.02, linear decay ended below the public start's BLEU of 0.300: 0.100 and 0.250",
        "epsilon = 8: 1 of 2 runs of HyFreeDP, robust ended below the public start's BLEU of 0.300: 0.000",
    ]


def test_dynamics_are_means_over_seeds():
    rows = [
        {"row": "hyfreedp_paper", "seed": seed, "step": step, "eta": 0.1 * (1 + step), "loss_threshold": 5.0}
        | {"private_loss": 4.0 + seed, "test_loss": 3.0 + seed, "test_perplexity": 20.0 + seed}
        for seed in (0, 1)
        for step in (0, 1)
    ]
    figure = language_generation_figures.draw_dynamics(pd.DataFrame(rows))
    title = ROWS["hyfreedp_paper"].title
    assert line(figure.axes[0], title)[1] == pytest.approx([0.1, 0.2])
    assert line(figure.axes[2], title)[1] == pytest.approx([3.5, 3.5])
    dots = figure.axes[2].collections[-1].get_offsets()
    assert sorted(dots[:, 1]) == [4, 4, 5, 5]
    assert [axis.get_ylabel() for axis in figure.axes[1:3]] == [
        "clipping threshold $R_l$ (nats)",
        "loss (nats per token)",
    ]
    (text,) = language_generation_figures.dynamics_findings(pd.DataFrame(rows))
    assert text == f"{title}: rate 0.1 at first, at most 0.2 (step 1), 0.2 at the end; test perplexity 20.50"


# -- 09: what tuning costs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuning(tmp_path_factory):
    budget = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 20}
    found = tuning_budget_figures.costs(
        tmp_path_factory.mktemp("cells"), [budget], batch_size=100, interval=5, runs=[5.0]
    )
    return budget, found, tuning_budget_figures.methods(5.0)


def test_costs_stand_beside_the_papers_percentages(tuning):
    budget, found, methods = tuning
    table = tuning_budget_figures.comparison(found, methods, [2.0])
    assert table.method.iloc[0] == "HyFreeDP, gamma = 1.01" and table.noise_percent.iloc[0] == pytest.approx(1.0)
    assert table.paper_percent.tolist() == ["<1", "20", "15", "20", "20", "20", "0", "0"]
    left, right = tuning_budget_figures.draw_costs(found, methods, [2.0]).axes
    assert line(left, r"$\varepsilon$ = 2")[0] == pytest.approx(table.share_percent)
    assert line(right, r"$\varepsilon$ = 2")[0] == pytest.approx(table.noise_percent)
    assert [data.tolist() for data in line(left, "the paper's figure")] == [[20, 15, 20, 20, 20], [1, 2, 3, 4, 5]]
    assert [data.tolist() for data in line(left, "the paper's <1")] == [[1], [0]]
    assert [data.tolist() for data in line(left, "the paper's 0")] == [[left.get_xlim()[0]] * 2, [6, 7]]
    assert left.get_xlabel().endswith("(%)") and right.get_xlabel().endswith("(%)")
    told = tuning_budget_figures.cost_findings(found, methods, budget, 100)
    assert len(told) == len(methods) + 1 and "B / " in told[-1]
    small = tuning_budget_figures.small_batches(1.0, [20, 2000]).more_noise_percent
    assert small.tolist() == pytest.approx([100 * ((1 - 2.0**-2) ** -0.5 - 1), 100 * ((1 - 200.0**-2) ** -0.5 - 1)])


@pytest.fixture
def results():
    """A map whose accuracy falls by 10 points a row; HyFreeDP at rate 1 on one optimizer, 0.01 on the other."""
    rows = []
    for base, rates in (("sgd", (0.1, 1.0)), ("adamw", (0.01, 0.1))):
        for seed in (0, 1):
            common = {"base": base, "seed": seed, "clipping_threshold": math.nan, "learning_rate": 1e-4}
            for height, threshold in enumerate((1.0, 10.0)):
                for rate in rates:
                    cell = {
                        "clipping_threshold": threshold,
                        "learning_rate": rate,
                        "percent": 80.0 - 10 * height + seed,
                    }
                    rows.append(common | {"method": "vanilla"} | cell)
            rows += [common | {"method": "constant", "learning_rate": rate, "percent": 75.0} for rate in rates]
            found = 1.0 if base == "sgd" else 0.01
            rows.append(common | {"method": "robust", "percent": 90.0 + seed, "eta": found})
    return pd.DataFrame(rows)


def test_the_map_has_the_means_and_the_dots_where_the_product_is_the_found_rate(results):
    figure = rate_map.draw(results)
    above, _, below, _ = figure.axes
    numbers = np.asarray(above.collections[0].get_array()).reshape(2, 2)
    assert numbers.tolist() == [[70.5, 70.5], [80.5, 80.5]]  # the largest threshold on top
    assert [text.get_text() for text in above.get_yticklabels()] == ["10", "1"]
    # eta R_g = 1: at R_g = 1 the second column, at R_g = 10 the first.
    assert above.lines[0].get_xdata() == pytest.approx([0.5, 1.5])
    assert below.lines[0].get_xdata() == pytest.approx([1.5])
    assert below.get_xlabel() == r"learning rate $\eta$"
    assert rate_map.learned_rate(results, "adamw") == 0.01
    assert np.isnan(rate_map.column_of([10.0], [0.1, 1.0])).all()


def test_what_the_map_tells_and_what_its_search_would_cost(results, monkeypatch):
    monkeypatch.setattr(tuning_budget, "dp_sgd_epsilon", lambda sigma, steps, **_: steps / 10)
    told = rate_map.findings(results, "smoke", 3.0)
    assert told[0] == (
        "SGD with momentum 0.9: best of 4 cells 80.5 % (R_g = 1, rate 0.1), 2 of them within 2 points, worst 70.5 %; "
        "counted, this search costs epsilon = 4.0 (RDP)"
    )
    assert told[1].startswith(
        "SGD with momentum 0.9: HyFreeDP 90.5 % (from 90.0 to 91.0 over 2 seeds) at a median rate"
    )
    assert told[1].endswith("of 1, without a search; best rate under automatic clipping 75.0 %")
    assert told[-1] == "Two runs of one cell differ by 1.0 points (median range over 2 seeds)"


@together("profile", ["smoke", "laptop", "gpu", "paper"])
def test_the_map_has_every_cell_once(profile):
    runs = rate_map.specs(profile, 3.0, 2)
    assert len(set(runs)) == len(runs)
    for base in rate_map.TITLES:
        thresholds, rates = rate_map.MAPS[profile][base]
        here = [spec for spec in runs if spec.base == base and spec.seed == 0]
        assert len(here) == (len(thresholds) + 1) * len(rates) + 1
