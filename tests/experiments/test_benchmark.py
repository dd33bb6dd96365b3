"""The benchmark's logic, not anyone's speed: the comparison is fair, the numbers are right, records are complete."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from hyfreedp.experiments.benchmark import __main__ as command
from hyfreedp.experiments.benchmark import cases as record
from hyfreedp.experiments.benchmark import contenders, efficiency, goals, measure, workloads
from hyfreedp.experiments.benchmark.cases import cases
from hyfreedp.experiments.benchmark.contenders import ALL_CONTENDERS, CONTENDERS, MAX_GRAD_NORM, Contender, Setup
from hyfreedp.experiments.benchmark.workloads import MODELS, Shape, Workload, make_workload
from hyfreedp.experiments.tables import paper

for extra in ("timm", "transformers", "peft"):
    pytest.importorskip(extra)

SHAPES = {
    "vit": Shape("vit", 16, 2, 2, tokens=5, outputs=5, batch_size=4, patch=4),
    "gpt2": Shape("gpt2", 16, 2, 2, tokens=7, outputs=20, batch_size=4),
    "llama": Shape("llama", 16, 2, 2, tokens=7, outputs=20, batch_size=4, hidden=24, tunings=("full", "lora")),
    "mlp": Shape("mlp", 16, 3, 1, tokens=1, outputs=5, batch_size=4, tunings=("full",)),
    "convnet": Shape("convnet", 8, 5, 1, tokens=1, outputs=5, batch_size=4, tunings=("full",)),
}
ALL = [(name, tuning) for name, shape in SHAPES.items() for tuning in shape.tunings]
SGD = Setup(partial(torch.optim.SGD, lr=1.0), epsilon=float("inf"))


@pytest.fixture
def tiny(monkeypatch):
    """A model that takes milliseconds, as "tiny"."""
    monkeypatch.setitem(MODELS, "tiny", SHAPES["vit"])


# ---- the contenders do the same work ---------------------------------------------------------------------------------


def clipped_mean(work: Workload, limit=MAX_GRAD_NORM) -> torch.Tensor:
    """The slow, obvious twin: one sample at a time."""
    total = 0
    for i in range(len(work.inputs)):
        logits = work.module(work.inputs[i : i + 1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), work.labels[i : i + 1].flatten())
        gradients = torch.autograd.grad(loss, work.trainable)
        gradient = torch.cat([g.flatten() for g in gradients])
        total = total + gradient * (limit / gradient.norm()).clamp(max=1)
    return total / len(work.inputs)


def step_taken(contender: Contender, work: Workload, setup: Setup = SGD) -> torch.Tensor:
    """What one step of SGD without noise changes, for a rate of 1."""
    work = work.copy()
    before = [p.detach().clone() for p in work.trainable]
    contender.make(work, setup)()
    return torch.cat([(old - p.detach()).flatten() for old, p in zip(before, work.trainable, strict=True)])


def stretched(family, tuning):
    """A workload of which some gradients are longer than the threshold and some shorter."""
    work = make_workload(SHAPES[family], tuning)
    for p in work.trainable:
        p.data *= 1.5
    return work


@pytest.mark.parametrize(("family", "tuning"), ALL)
def test_every_private_contender_takes_the_same_clipped_step(family, tuning):
    work = stretched(family, tuning)
    expected = clipped_mean(work)
    assert 0 < expected.norm() < MAX_GRAD_NORM
    for name in ("opacus_hooks", "opacus_ghost", "opacus_functorch", "ours"):
        assert (step_taken(ALL_CONTENDERS[name], work) - expected).norm() < 2e-5 * expected.norm(), name
    for name in ("ours_k1", "ours_k5", "ours_k10"):  # the rate is learned, the direction is not
        step = step_taken(CONTENDERS[name], work)
        rate = step @ expected / expected.norm() ** 2
        # Rates near 1e-4 make steps that float32 weights hold to a few digits.
        assert rate > 0 and (step / rate - expected).norm() < 0.05 * expected.norm(), name
    unclipped = clipped_mean(work, float("inf"))
    torch.testing.assert_close(step_taken(CONTENDERS["plain"], work), unclipped, rtol=1e-4, atol=1e-6)


def test_contenders_add_the_same_noise():
    """At a rate of 1 the weights change by the noise as well, whose standard deviation is sigma R_g / B."""
    work = make_workload(SHAPES["gpt2"], "full")
    quiet = step_taken(CONTENDERS["ours"], work)
    for name in ("opacus_hooks", "opacus_ghost", "ours"):
        step = step_taken(ALL_CONTENDERS[name], work, replace(SGD, epsilon=3.0))
        noise = (step - quiet) * len(work.inputs) / MAX_GRAD_NORM
        # 7,000 numbers: 5 % are six standard errors of their standard deviation.
        assert noise.std().item() == pytest.approx(contenders._noise_multiplier(3.0), rel=0.05), name


def test_shapes_of_the_paper_are_those_of_the_published_models():
    """Parameter counts of the models' own pages: 22.05 and 86.6 M with 1,000 classes; 124.4 M; 6.738 G."""
    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in workloads._MAKERS[MODELS[name].family](MODELS[name])[0].parameters())
            for name in workloads.ON_GPU
        }
    vit = {"vit_small": (22_050_664, 384, 10), "vit_base": (86_567_656, 768, 100)}
    for name, (published, width, classes) in vit.items():
        assert counts[name] == published - (1000 - classes) * (width + 1)
    untied, positions = 50257 * 768, (1024 - 128) * 768
    assert counts["gpt2"] == 124_439_808 + untied - positions
    assert counts["gpt2_t512"] == 124_439_808 + untied - 512 * 768
    assert counts["llama2_7b"] == 6_738_415_616


# ---- the numbers are right -------------------------------------------------------------------------------------------


def test_rounds_take_turns_whole_periods_at_a_time_and_leave_out_who_fails():
    """Time passes only when a step says so; every round begins with another contender."""
    now, order = [0.0], []

    def lasting(name, *durations):
        pending = iter(durations)

        def step():
            order.append(name)
            now[0] += next(pending)

        return step

    steps = {
        "a": (lasting("a", 1.0, 2.0, 4.0), 1),
        "b": (lasting("b", *[5.0, 1.0, 1.0] * 3), 3),
        "c": (lasting("c", 1.0), 1),
    }
    seconds, failed = measure.time_rounds(steps, 3, clock=lambda: now[0])
    assert seconds == {"a": [1.0, 2.0, 4.0], "b": [7 / 3] * 3}
    assert failed == {"c": "StopIteration: "} and "".join(order) == "abbbc" + "bbbca" + "abbb"


def test_ratios_are_those_of_each_round():
    """A machine that is slow for a while slows both; the ratio of medians would be 1.5 here."""
    found = record._statistics("own", {"own": [2.0, 20.0, 3.0, 30.0, 2.0], "ours": [1.0, 10.0, 2.0, 20.0, 1.0]})
    assert [found[f"ratio_to_ours{name}"] for name in ("_q1", "", "_q3")] == [1.5, 2.0, 2.0]


def test_peak_memory_counts_weights_state_and_the_largest_moment():
    """A linear layer without bias under SGD with momentum: what is alive can be counted by hand."""
    module = torch.nn.Linear(256, 256, bias=False)
    work = Workload(module, torch.zeros(64, 256), torch.zeros(64, dtype=torch.long))
    mib = 256 * 256 * 4 / 2**20  # of one copy of the weight

    def make(work, setup):
        optimizer = torch.optim.SGD(work.trainable, lr=0.1, momentum=0.9)

        def step():
            temporary = torch.zeros(8, 256, 256)
            del temporary
            work.trainable[0].grad = torch.ones(256, 256)
            optimizer.step()

        return step

    batch = (work.inputs.nbytes + work.labels.nbytes) / 2**20
    with measure.garbage_stays():
        found = measure.peak_memory(Contender("", make), work, Setup())
    # weight, momentum, last step's gradient, temporary
    assert found == pytest.approx(3 * mib + 8 * mib + batch, abs=0.01)


# ---- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.whole
def test_a_contender_that_cannot_is_recorded_with_its_reason(tiny, monkeypatch):
    def refuse(work, setup):
        raise NotImplementedError("parameter tying is not supported\nand more lines")

    monkeypatch.setitem(ALL_CONTENDERS, "opacus_ghost", Contender("", refuse))
    rows = record.measure(cases(["tiny"], ["full"], ["plain", "opacus_ghost"]), device="cpu", rounds=1, threads=1)
    plain, ghost = rows.to_dict("records")
    assert ghost["failure"] == "NotImplementedError: parameter tying is not supported"
    assert np.isnan(ghost["seconds"]) and np.isnan(ghost["peak_mib"])
    assert plain["failure"] == "" and plain["ratio_to_plain"] == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cases(["vit_huge"]), "models must be one of .*'vit_base'.*, got 'vit_huge'"),
        (lambda: cases(["llama2_7b"], ["biases"]), "none of the models llama2_7b can be trained by biases"),
        (lambda: record.measure([], device="cpu", rounds=0, threads=1), "rounds must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused_clearly(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_interrupted_record_goes_on_where_it_was(workspace, monkeypatch, capsys):
    """Case by case: what was measured before the interrupt is written as it is, and left out the next time."""
    done = []

    def measured(todo, **kwargs):
        (case,) = todo
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(str(case))
        place = {"model": case.model, "tuning": case.tuning, "varied": "", "value": 0}
        return pd.DataFrame([place | {"contender": name, "seconds": 0.1 + 0.2} for name in case.contenders])

    monkeypatch.setattr(command, "measure", measured)
    monkeypatch.setattr(command.goals, "markdown", lambda rows: "")
    arguments = ["--models", "tiny", "vit_d192", "--contenders", "plain", "--resume"]
    path = workspace.results / "laptop" / "efficiency.csv"
    assert command.main(arguments) == 130 and "goes on from here" in capsys.readouterr().out
    first, before = path.read_text(), list(done)
    assert len(before) == 2 and "0.30000000000000004" in first
    done.clear()
    while command.main(arguments) == 130:
        done.clear()
    assert path.read_text().startswith(first)
    complete = len(cases(["tiny", "vit_d192"], contenders=["plain"]))
    assert len(pd.read_csv(path).drop_duplicates()) == complete
    done.clear()  # another contender: all of its case take turns again, and none is there twice
    assert command.main(["--models", "tiny", "--tunings", "full", "--contenders", "ours", "--resume"]) == 0
    rows = pd.read_csv(path)
    assert done == ["tiny full"] and len(rows) == complete + 1
    assert list(rows[(rows.model == "tiny") & (rows.tuning == "full")].contender) == ["plain", "ours"]


# ---- goals -----------------------------------------------------------------------------------------------------------


def test_goals_are_judged_by_the_right_ratios():
    seconds = {"plain": 1.0, "opacus_hooks": 1.6, "opacus_ghost": 2.0, "ours": 1.25, "ours_k1": 1.9, "ours_k5": 1.35}
    ratios = {f"ratio_to_{name}": [s / seconds[name] for s in seconds.values()] for name in ("plain", "ours")}
    shown = goals.markdown(pd.DataFrame({"model": "m", "tuning": "full", "contender": list(seconds)} | ratios))
    assert [line.split(" | ")[-1] for line in shown.splitlines()[2:]] == [
        "1.25 |",
        "0.62 |",
        "0.78 |",
        "**1.52** |",
        "1.08 |",
    ]


def test_whole_runs_stand_side_by_side(monkeypatch, tiny):
    monkeypatch.setattr(record, "RUNS", {name: CONTENDERS[name] for name in ("plain", "ours")})  # of one step
    rows = record.measure_runs(["tiny"], rounds=1, threads=1)
    assert rows.failure.tolist() == ["", ""] and rows.ratio_to_plain[0] == 1
    shown = pd.concat([rows, rows[1:].assign(contender="opacus_hooks"), rows[1:].assign(contender="robust")])
    assert goals.runs(shown).splitlines()[2] == "| tiny |" + f" {rows.ratio_to_plain[1]:.2f} |" * 3


# ---- the paper's table and its model of the cost ---------------------------------------------------------------------


def test_measurements_stand_beside_the_papers_rows():
    frame = pd.DataFrame(
        {"model": "vit_d384", "tuning": ["full", "biases"], "contender": "ours_k5", "ratio_to_ours": [1.1, 1.2]}
    ).assign(device="cpu")
    table = efficiency.beside_paper(paper.load("eff"), {"mine": frame, "none": None}, "cpu")
    assert len(table) == 15 and table["none"].isna().all()
    mine = table[table["mine"].notna()].set_index(["paper_model", "tuning", "interval"])
    assert mine["mine"].to_dict() == {("Vit-base", "full", 5): 1.1, ("Vit-base", "bitfit", 5): 1.2}
    assert mine.paper.to_dict() == {("Vit-base", "full", 5): 1.063, ("Vit-base", "bitfit", 5): 1.089}


def test_memory_is_compared_with_the_plain_step_of_the_same_case():
    rows = pd.DataFrame(
        {
            "model": list("aaabb"),
            "tuning": "full",
            "varied": np.nan,  # as an empty string is read back
            "value": [0, 0, 1, 0, 0],
            "contender": ["ours", "plain", "plain", "plain", "ours"],
            "peak_mib": [3.0, 2.0, 5.0, np.nan, 1.0],
        }
    )
    np.testing.assert_array_equal(efficiency.memory_ratio(rows), [1.5, 1, 1, np.nan, np.nan])
    shown = efficiency.relative(rows.assign(ratio_to_plain=2.0), ["ours"])
    assert shown.ratio.tolist() == [2.0, 2.0, 1.5]
