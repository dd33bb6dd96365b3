"""Figures of notebooks 02 (attack), 08 and 10: what is drawn is what the tables say, and axes have units."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from artists import bars, line
from scipy import stats

from hyfreedp import calibrate_noise
from hyfreedp.experiments.audits import attack, attack_figures, campaign, campaign_figures, one_run
from hyfreedp.experiments.benchmark import figures, goals, tables
from hyfreedp.experiments.studies.noise_split import delta_curve
from hyfreedp.experiments.tables import paper

pytestmark = pytest.mark.usefixtures("figure_style")


# -- 02: the attack ----------------------------------------------------------------------------------------------------


@pytest.fixture
def advantages():
    rows = []
    for observer in ("sees a random batch", "knows the others"):
        rows.append((observer, "raw", 0.0, 0.8, 0.7, 0.9, math.inf, 1.0))
        for probe in ("losses", "contrasts"):
            rows += [(observer, probe, 1.0, 0.1, 0.0, 0.2, 0.5, 0.3), (observer, probe, 0.25, 0.6, 0.55, 0.7, 2.0, 0.5)]
    columns = ["observer", "probe", "weakening", "advantage", "low", "high", "epsilon", "bound"]
    return pd.DataFrame(rows, columns=columns)


def test_advantages_stand_under_the_bound_with_their_intervals(advantages):
    games = pd.DataFrame(
        [
            {"probe": probe, "weakening": weakening, "planted": planted, "eta": 1.0 + 9 * planted}
            for probe, weakening in (("raw", 0.0), ("losses", 1.0), ("contrasts", 1.0), ("losses", 0.25))
            for planted in (False, True)
        ]
    ).assign(seed=0, observer="sees a random batch", run=0)
    figure = attack_figures.draw_attack(games, advantages, exact=2.0, delta=1e-4)
    rates, _, known = figure.axes
    # Six dots, those of the outlier at the end of the axis, 2.25 times the exact rate.
    assert [one.get_xdata()[0] for one in rates.lines] == pytest.approx([1.0, 4.5] * 3)
    assert [text.get_text() for text in rates.get_yticklabels()] == ["raw", "three losses", "contrasts"]
    epsilon, bound = line(known, "bound of epsilon")
    assert bound == pytest.approx((np.exp(epsilon) - 1 + 2e-4) / (np.exp(epsilon) + 1))
    x, y, low, high = bars(known, "contrasts")
    assert x == pytest.approx(np.array([0.5, 2.0]) * 1.1**0.5) and y.tolist() == [0.1, 0.6]
    assert (low[:, 1], high[:, 1]) == (pytest.approx([0.0, 0.55]), pytest.approx([0.2, 0.7]))
    assert line(known, "raw rate: no epsilon")[1].tolist() == [0.8, 0.8]
    assert known.get_title() == "observer knows the others" and known.get_xlabel() == r"$\varepsilon$ of the release"
    told = attack_figures.attack_findings(advantages)
    assert told[0].endswith("raw rate: advantage 0.80, 95 % interval [0.70, 0.90].")
    assert told[-1].startswith("Of 8 private settings, weakened ones included, 4 have an interval wholly above")
    (judged,) = attack_figures.verdicts(advantages)
    assert judged.outcome == "contradicted" and "0.80 in raw rates, above the bound in 4 of 8" in judged.number
    (judged,) = attack_figures.verdicts(advantages.assign(bound=1.0))
    assert judged.outcome == "reproduced"


def test_games_are_of_every_run_and_both_observers(tmp_path):
    here = np.linspace(1, 2, 40)
    records = pd.DataFrame({"ahead": here - 0.1, "here": here, "behind": here + 0.3})
    parts = [records.assign(part=part) for part in ("train", "batch")] + [records.head(1).assign(part="outlier")]
    probed = pd.concat(parts).assign(step=2, distance=0.5)
    setting = {"sigmas": {"losses": 5.0}, "weakenings": [1.0], "runs": 2}
    games, cells = attack.games(tmp_path, [probed, probed], 2, **setting)
    assert games.groupby(["observer", "seed"]).size().to_dict() == {
        (observer, seed): 8 for observer in ("sees a random batch", "knows the others") for seed in (0, 1)
    }
    assert len(set(cells)) == 4
    known = games[(games.observer == "knows the others") & (games.probe == "raw") & ~games.planted]
    assert known.eta.nunique() == 1  # nothing is drawn


# -- 08: efficiency ----------------------------------------------------------------------------------------------------


@pytest.fixture
def record():
    """Two models, one with biases too; every contender takes a tenth more than the one before it."""
    rows = []
    for model, tuning in (("vit_d192", "full"), ("vit_d384", "full"), ("vit_d384", "biases")):
        for place, name in enumerate(figures.LABELS):
            ratio = 1 + place / 10
            row = {"model": model, "tuning": tuning, "varied": math.nan, "value": 0, "contender": name}
            row |= {"seconds": ratio, "seconds_min": 0.9, "seconds_max": 2.0, "device": "cpu", "failure": math.nan}
            row |= {"ratio_to_plain": ratio, "ratio_to_plain_q1": ratio - 0.01, "ratio_to_plain_q3": ratio + 0.02}
            row |= {"ratio_to_ours": ratio, "ratio_to_ours_q1": ratio - 0.01, "ratio_to_ours_q3": ratio + 0.02}
            rows.append(row | {"peak_mib": 100 * ratio})
    return pd.DataFrame(rows)


def test_contenders_are_bars_over_a_plain_step(record):
    figure = figures.draw_contenders(record)
    time, biases, memory, _ = figure.axes
    heights = [patch.get_height() for patch in time.patches]
    assert heights == pytest.approx(np.repeat([1 + place / 10 for place in range(1, len(figures.LABELS))], 2))
    assert len(biases.patches) == len(figures.PRIVATE)
    assert [patch.get_height() for patch in memory.patches] == pytest.approx(np.repeat([1.1, 1.2, 1.3, 1.4], 2))
    assert [text.get_text() for text in memory.get_xticklabels()] == ["vit_d192", "vit_d384"]
    assert time.get_ylabel() == "time per step / plain step"
    told = figures.contender_findings(record)
    assert told[0].startswith("full: time to a plain step Opacus, hooks 1.10 to 1.10,")
    assert told[1].startswith("biases: time to a plain step Opacus, hooks 1.10,")
    assert len(told) == 4
    table = figures.time_table(record)
    assert table.loc[("vit_d192", "full", "plain, not private"), "milliseconds"] == 1000
    assert figures.failure_text(record) == "Every contender could train every model."
    assert figures.failure_text(record.head(1).assign(failure="no")) == "* vit_d192, full: plain, not private: no"


def test_the_interval_is_drawn_with_the_papers_numbers_and_the_model(record):
    compared = figures.interval_table(paper.load("eff"), {"record": record, "this notebook": None}, "cpu")
    ratio = {k: 1 + list(figures.LABELS).index(f"ours_k{k}") / 10 for k in tables.INTERVALS}
    ours = compared[compared.model == "vit_d192"].set_index("interval").record
    assert ours.to_dict() == pytest.approx(ratio)
    theirs, mine = figures.draw_intervals(compared, record, "cpu").axes
    x, y = line(mine, "theory: f = 1/3")
    assert y == pytest.approx((3 + 2 / x) / 3)
    printed = compared[(compared.paper_model == "Vit-small") & (compared.tuning == "full")]
    assert [data.tolist() for data in line(theirs, "Vit-small, full")] == [[1, 5, 10], printed.paper.tolist()]
    x, y, low, high = bars(mine, "biases")
    assert (x.tolist(), y) == ([1, 5, 10], pytest.approx(list(ratio.values())))
    assert high[:, 1] - low[:, 1] == pytest.approx([0.03] * 3)
    assert mine.get_xlabel() == "interval $K$ (steps)"
    share = (ratio[1] - 1) / 2
    assert figures.share_findings(record)[0] == f"full: a forward pass is {share:.2f} of our private step, by K = 1"
    told = figures.interval_findings(compared, record)
    assert told[-1].startswith("Vit-small (full), K = 10: paper") and len(told) == 9
    alone = figures.interval_findings(compared.assign(record=math.nan), record)
    assert alone[0] == f"vit_d192 (full), K = 1: {ratio[1]:.2f}"
    at = (
        paper.load("eff").set_index(["model", "tuning", "method", "metric"]).value["Vit-base", "bitfit", "K=1", "ratio"]
    )
    assert f"{at:.2f} with BitFit" in figures.interval_text(compared)


def test_growth_is_drawn_along_each_dimension(record):
    growth = pd.concat([record[record.model == "vit_d192"].assign(varied="tokens", value=value) for value in (50, 17)])
    above, below = figures.draw_growth(growth).axes
    x, y = line(above, figures.LABELS["opacus_hooks"])
    assert x.tolist() == [17, 50] and y == pytest.approx([1.1, 1.1])
    assert below.get_xlabel() == "tokens $T$" and below.get_ylabel() == "peak memory / plain step"
    told = figures.growth_findings(growth)
    assert told[0] == f"{figures.LABELS['opacus_hooks']}: time 1.10 to 1.10, peak memory 1.10 to 1.10 of a plain step"


def test_goals_that_are_missed_are_named():
    judged = pd.DataFrame(
        {"goal": ["a", "b"], "tuning": "full", "model": "m", "limit": [1.0, 1.0], "measured": [0.5, 1.25]}
    ).assign(met=[True, False])
    assert goals.missed_text(judged) == "1 of 2 met. Missed: b, full, m: 1.25 > 1.00."
    assert goals.missed_text(judged.head(1)) == "1 of 1 met. None missed."


def test_a_record_comes_first_and_without_any_it_is_said(tmp_path):
    frame = pd.DataFrame({"a": [1]})
    assert tables.first_known(tmp_path, None, frame) is frame
    with pytest.raises(RuntimeError, match="no accelerator here, and no record"):
        tables.first_known(tmp_path, None)


# -- 10: audits --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def probes():
    rows = [
        {"probe": probe, "factor": factor, "claimed": 3.0, "true_epsilon": 3.0 / factor, "lower_bound": bound}
        for probe in ("losses", "votes")
        for factor, bound in ((1.0, 2.5), (0.5, 4.0))
    ]
    return pd.DataFrame(rows)


def test_bounds_of_a_probe_stand_between_claim_and_truth(probes):
    first, _ = campaign_figures.draw_probes(probes, 3.0, 0.95).axes
    sigma = campaign.single_sigma(3.0)
    factor, exact = line(first, "exact, noise that is there")
    mu = 1 / (factor[0] * sigma)  # Balle and Wang (2018), Theorem 8
    delta = stats.norm.cdf(mu / 2 - exact[0] / mu) - math.exp(exact[0]) * stats.norm.cdf(-mu / 2 - exact[0] / mu)
    assert delta == pytest.approx(campaign.DELTA, rel=1e-6) and factor[0] == 0.5
    assert exact[-1] == pytest.approx(3.0, rel=1e-3)
    assert [data.tolist() for data in line(first, "audit, 95 %")] == [[1.0, 0.5], [2.5, 4.0]]
    assert first.get_ylabel() == r"$\varepsilon$ of the release"
    told = campaign_figures.probe_findings(probes)
    assert told[0] == "One probe of losses: the bound is 2.50 where 3.00 is claimed, not refuted"
    assert told[2].endswith("2 of 2 claims are refuted, from a factor of 0.5 on") and told[3].endswith("True")


@pytest.fixture(scope="module")
def joint():
    rows = [
        {"noise": noise, "counted": count, "delta": delta, "claimed": claimed, "lower_bound": bound}
        for noise, bound in (("independent", 2.0), ("same_batch", 1.0))
        for count, claimed in (("independent", 1.5), ("same_batch", 3.0))
        for delta in (1e-4, 1e-3)
    ]
    return campaign._with_verdicts(pd.DataFrame(rows))


def test_both_ways_of_counting_keep_the_target_by_their_own_account():
    plan = {"epsilon": 1.0, "records": 1000, "batch_size": 100, "steps": 10, "interval": 2, "accountant": "rdp"}
    splits = campaign.joint_splits(**plan)
    for count, split in splits.items():
        assert split.composition == count and 0.99 < split.epsilon <= 1.0
        assert (split.sample_rate, split.target_delta) == (0.1, pytest.approx(1000**-1.1))
    assert splits["independent"].sigma_loss < splits["same_batch"].sigma_loss  # it credits a sampling that is not there


def test_curves_of_both_counts_stand_beside_the_bounds(joint):
    plan = {"target_delta": 1e-3, "sample_rate": 0.1, "steps": 10, "accountant": "rdp", "interval": 2}
    split = calibrate_noise(target_epsilon=1.0, probe="losses", allocation="constant", **plan)
    splits = {"independent": split, "same_batch": replace(split, sigma_loss=2 * split.sigma_loss)}
    for axis, (noise, one) in zip(campaign_figures.draw_joint(joint, splits, 0.95).axes, splits.items(), strict=True):
        deltas, epsilons = line(axis, "counted as independent")
        assert deltas == pytest.approx(delta_curve(one, "independent", epsilons))
        assert line(axis, "audit, 95 %")[1].tolist() == [{"independent": 2.0, "same_batch": 1.0}[noise]] * 2
        assert [data.item() for data in line(axis, "target")] == [1e-3, 1.0]
    told = campaign_figures.joint_findings(joint, 0.95)
    assert "refuted at 2 of 2 values of delta" in told[0] and "at least 2.00 where 1.50 is claimed" in told[0]
    assert told[1].endswith("claimed to cost 3.00 at the target's delta; the audit finds at least 2.00")
    assert told[3] == "Claims of the same-batch count refuted: 0 of 4"


@pytest.fixture(scope="module")
def canaries():
    rows = [
        {"method": method, "target": target, "claimed": target, "lower_bound": bound, "right": 90, "guesses": 100}
        | {"canaries": 200}
        for method in campaign.LABELS
        for target, bound in ((1.0, 0.5 + (method == "tuned")), (math.inf, 5.0))
    ]
    return campaign._with_verdicts(pd.DataFrame(rows))


def test_canaries_are_grouped_by_what_is_claimed(canaries):
    (axis,) = campaign_figures.draw_canaries(canaries, 0.95).axes
    for place, label in enumerate(campaign.LABELS.values()):
        x, y = line(axis, label)
        assert x == pytest.approx(np.array([0, 1]) + 0.14 * (place - 2))
        assert y.tolist() == [0.5 + (label == campaign.LABELS["tuned"]), 5.0]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["1", "without noise"]
    ceiling = one_run.perfect_bound(100, 200, campaign.DELTA)
    assert line(axis, f"100 guesses, all right: {ceiling:.2f}")[1].tolist() == [ceiling, ceiling]
    (claim,) = axis.collections
    assert claim.get_segments()[0][:, 1].tolist() == [1, 1]
    without, private, tuned = campaign_figures.canary_findings(canaries)
    assert without.startswith("Without noise 90% or more") and "1 of 5 claims are refuted" in private
    assert "1.50 (untuned 0.50) where 1 is claimed; 1 of these claims are refuted" in tuned


def test_all_audits_are_one_table_and_its_verdicts_are_counted(probes, joint, canaries):
    table = campaign.all_audits(probes, joint, canaries, 0.95)
    assert len(table) == len(probes) + len(joint) + len(canaries) and (table.confidence == 0.95).all()
    assert table.mechanism.iloc[1] == "one probe, losses, fault: noise x 0.5"
    assert table.verdict[table.claimed == math.inf].eq("nothing claimed").all()
    # Known to be wrong: two faults and two rows of the independent count, all refuted; of the others one.
    (text,) = campaign_figures.all_findings(table)
    others = len(table) - 4 - 5
    assert text == f"22 audits: of 4 claims that we know to be far too small 4 are refuted, and of {others} others 1"


def test_audits_are_run_once_and_kept(tmp_path, monkeypatch):
    calls = []

    def train_with_canaries(**arguments):
        calls.append(arguments)
        return pd.DataFrame(
            {"epsilon": arguments["epsilon"], "accuracy": 0.5, "training_loss": arguments["learning_rate"]}
            | {"score": [1.0, 0.0] * 10, "included": [True, False] * 10}
        )

    monkeypatch.setattr(one_run, "train_with_canaries", train_with_canaries)
    sizes = campaign.SIZES["smoke"] | {"epsilons": [1.0], "rates": [campaign.RATE, 1e-3]}
    table = campaign.canary_audits(tmp_path, sizes, seeds=2, confidence=0.95)
    assert table.method.tolist() == list(campaign.LABELS) and table.accuracy_percent.tolist() == [50] * 5
    assert len(calls) == 2 * (2 + 3)  # two rates at a constant rate, three other methods
    # The search keeps the lowest training loss: every score is right, all canaries of both seeds are guessed.
    assert table.right.tolist() == table.guesses.tolist()
    campaign.canary_audits(tmp_path, sizes, seeds=2, confidence=0.95)
    assert len(calls) == 10


def test_the_largest_bound_of_an_auditor_who_is_always_right():
    table = campaign.largest_bounds([10, 1000])
    # (e^eps / (1 + e^eps))^m = 0.05
    exact = [-math.log(0.05 ** (-1 / m) - 1) for m in (10, 1000)]
    assert table.largest_bound.tolist() == pytest.approx(exact, rel=1e-6)
