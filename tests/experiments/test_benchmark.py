"""The benchmark's logic, not anyone's speed: the comparison is fair, the numbers are right, records are complete."""

import copy
import math
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from cases import together

from hyfreedp import PRESETS, NoiseGenerator
from hyfreedp.clipping import AutomaticClipping
from hyfreedp.experiments.benchmark import __main__ as command
from hyfreedp.experiments.benchmark import contenders, goals, learning, measure, noise, record, tables, workloads
from hyfreedp.experiments.benchmark.contenders import ALL_CONTENDERS, CONTENDERS, MAX_GRAD_NORM, Contender, Setup
from hyfreedp.experiments.benchmark.record import cases
from hyfreedp.experiments.benchmark.workloads import MODELS, Shape, Workload, make_workload
from hyfreedp.experiments.tables import paper
from hyfreedp.experiments.tables.plan import ROWS

for extra in ("timm", "transformers", "peft"):
    pytest.importorskip(extra)

SHAPES = {
    "vit": Shape("vit", 16, 2, 2, tokens=5, outputs=5, batch_size=4, patch=4),
    "gpt2": Shape("gpt2", 16, 2, 2, tokens=7, outputs=20, batch_size=4),
    "llama": Shape("llama", 16, 2, 2, tokens=7, outputs=20, batch_size=4, hidden=24, tunings=("full", "lora")),
}
ALL = [(name, tuning) for name, shape in SHAPES.items() for tuning in shape.tunings]
SGD = Setup(partial(torch.optim.SGD, lr=1.0), epsilon=float("inf"))


@pytest.fixture
def tiny(monkeypatch):
    """A model that takes milliseconds, as "tiny"."""
    monkeypatch.setitem(MODELS, "tiny", SHAPES["vit"])


# ---- the contenders do the same work ---------------------------------------------------------------------------------


def clip_factor(norm: torch.Tensor) -> torch.Tensor:
    return (MAX_GRAD_NORM / norm).clamp(max=1)


def clipped_mean(work: Workload, factor=clip_factor) -> torch.Tensor:
    """The slow, obvious twin: one sample at a time."""
    total = 0
    for i in range(len(work.inputs)):
        logits = work.module(work.inputs[i : i + 1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), work.labels[i : i + 1].flatten())
        gradients = torch.autograd.grad(loss, work.trainable)
        gradient = torch.cat([g.flatten() for g in gradients])
        total = total + gradient * factor(gradient.norm())
    return total / len(work.inputs)


def step_taken(contender: Contender, work: Workload) -> torch.Tensor:
    """What one step of SGD without noise changes, for a rate of 1."""
    work = work.copy()
    before = [p.detach().clone() for p in work.trainable]
    contender.make(work, SGD)()
    return torch.cat([(old - p.detach()).flatten() for old, p in zip(before, work.trainable, strict=True)])


@pytest.mark.parametrize(("family", "tuning"), ALL)
def test_every_private_contender_takes_the_same_clipped_step(family, tuning):
    work = make_workload(SHAPES[family], tuning)
    for p in work.trainable:  # so that some gradients are longer than the threshold and some shorter
        p.data *= 1.5
    expected = clipped_mean(work)
    assert 0 < expected.norm() < MAX_GRAD_NORM
    for name in ("opacus_hooks", "opacus_ghost", "opacus_functorch", "ours"):
        step = step_taken(CONTENDERS[name], work)
        assert (step - expected).norm() < 2e-5 * expected.norm(), name
    for name in ("ours_k1", "ours_k5", "ours_k10"):  # the rate is learned, the direction is not
        step = step_taken(CONTENDERS[name], work)
        rate = step @ expected / expected.norm() ** 2
        # Rates near 1e-4 make steps that float32 weights hold to a few digits.
        assert rate > 0 and (step / rate - expected).norm() < 0.05 * expected.norm(), name


@pytest.fixture
def opake():
    """Where it is installed, which is an environment of its own: it wants PyTorch 2.9, this package 2.6."""
    return pytest.importorskip("opake.dpsgd.clipping", reason="opake is not installed (pip install opake)")


@pytest.mark.parametrize(("family", "tuning"), ALL)
def test_opake_takes_the_same_clipped_step(opake, family, tuning):
    work = make_workload(SHAPES[family], tuning)
    for p in work.trainable:
        p.data *= 1.5
    expected = clipped_mean(work)
    step = step_taken(ALL_CONTENDERS["opake"], work)
    assert (step - expected).norm() < 2e-5 * expected.norm()


def test_opake_normalises_gradients_as_our_automatic_clipping(opake, monkeypatch):
    """AUTO-S in both, in place of the benchmark's clipping: opake's factor is ours, stability included."""
    monkeypatch.setattr(contenders, "AbadiClipping", lambda threshold: AutomaticClipping())
    monkeypatch.setattr(
        opake, "clipped_grad", lambda loss, *, clipping_norm, **kw: opake.auto_clipped_grad(loss, R=clipping_norm, **kw)
    )
    work = make_workload(SHAPES["vit"], "full")
    expected = clipped_mean(work, lambda norm: 1 / (norm + 0.01))
    for name in ("ours", "opake"):
        assert (step_taken(ALL_CONTENDERS[name], work) - expected).norm() < 2e-5 * expected.norm(), name


@together(("family", "tuning"), ALL)
def test_the_plain_step_is_the_unclipped_one(family, tuning):
    work = make_workload(SHAPES[family], tuning)
    logits = work.module(work.inputs)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), work.labels.flatten())
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, work.trainable)])
    torch.testing.assert_close(step_taken(CONTENDERS["plain"], work), expected, rtol=1e-4, atol=1e-6)


def test_contenders_add_the_same_noise():
    """At a rate of 1 the weights change by the noise as well, whose standard deviation is sigma R_g / B."""
    work = make_workload(SHAPES["gpt2"], "full")
    quiet = step_taken(CONTENDERS["ours"], work)
    installed = ["opake"] if find_spec("opake") else []
    for name in ("opacus_hooks", "opacus_ghost", "ours", *installed):
        copy = work.copy()
        before = [p.detach().clone() for p in copy.trainable]
        ALL_CONTENDERS[name].make(copy, replace(SGD, epsilon=3.0))()
        step = torch.cat([(old - p.detach()).flatten() for old, p in zip(before, copy.trainable, strict=True)])
        noise = (step - quiet) * len(work.inputs) / MAX_GRAD_NORM
        # 7,000 numbers: 5 % are six standard errors of their standard deviation.
        assert noise.std().item() == pytest.approx(contenders._noise_multiplier(3.0), rel=0.05), name


def test_copies_share_what_is_frozen_and_nothing_else():
    work = make_workload(SHAPES["llama"], "lora")
    copy = work.copy()
    for (name, ours), (_, theirs) in zip(work.module.named_parameters(), copy.module.named_parameters(), strict=True):
        assert (ours is theirs) == (not ours.requires_grad), name
        assert torch.equal(ours, theirs)


@together("tuning", ["full", "biases", "lora"])
def test_tunings_train_what_they_say(tuning):
    work = make_workload(SHAPES["vit"], tuning)
    trained = {name for name, p in work.module.named_parameters() if p.requires_grad}
    everything = {name for name, _ in work.module.named_parameters()}
    expected = {
        "full": everything - {"cls_token", "pos_embed"},
        "biases": {name for name in everything if name.endswith(".bias")},
        "lora": {name for name in everything if "lora_" in name},
    }[tuning]
    assert trained == expected != set()


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
    assert counts["llama2_7b"] == 6_738_415_616


# ---- the numbers are right -------------------------------------------------------------------------------------------


class Clock:
    """Time passes only when a step says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def step(self, *durations):
        pending = iter(durations * 100)

        def run():
            self.now += next(pending)

        return run


def test_rounds_give_the_time_per_step_over_whole_periods():
    clock = Clock()
    steps = {"plain": (clock.step(1.0, 2.0, 4.0), 1), "probing": (clock.step(5.0, 1.0, 1.0), 3)}
    seconds, failed = measure.time_rounds(steps, 4, clock=clock)
    assert seconds == {"plain": [1.0, 2.0, 4.0, 1.0], "probing": [7 / 3] * 4}
    assert not failed


def test_every_round_begins_with_another_contender():
    order = []
    steps = {name: (partial(order.append, name), 1) for name in "abc"}
    measure.time_rounds(steps, 3)
    assert "".join(order) == "abcbcacab"


def test_ratios_are_those_of_each_round():
    """A machine that is slow for a while slows both; the ratio of medians would be 1.5 here."""
    own, reference = [2.0, 20.0, 3.0, 30.0, 2.0], [1.0, 10.0, 2.0, 20.0, 1.0]
    assert measure.ratio_quartiles(own, reference) == (1.5, 2.0, 2.0)


def test_a_step_that_fails_in_a_later_round_is_left_out():
    clock = Clock()
    calls = []

    def fragile():
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no more")

    seconds, failed = measure.time_rounds({"plain": (clock.step(1.0), 1), "fragile": (fragile, 1)}, 4, clock=clock)
    assert seconds == {"plain": [1.0] * 4}
    assert failed == {"fragile": "MemoryError: no more"} and len(calls) == 2


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


def test_a_contender_that_cannot_is_recorded_with_its_reason(tiny, monkeypatch):
    def refuse(work, setup):
        raise NotImplementedError("parameter tying is not supported\nand more lines")

    monkeypatch.setitem(ALL_CONTENDERS, "opacus_ghost", Contender("", refuse))
    rows = record.measure(cases(["tiny"], ["full"], ["plain", "opacus_ghost"]), device="cpu", rounds=1, threads=1)
    plain, ghost = rows.to_dict("records")
    assert ghost["failure"] == "NotImplementedError: parameter tying is not supported"
    assert np.isnan(ghost["seconds"]) and np.isnan(ghost["peak_mib"])
    assert plain["failure"] == "" and plain["ratio_to_plain"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own reading
@pytest.mark.parametrize("tuning", ["full", "biases"])
def test_compiled_models_are_compiled_each_for_itself(tuning, monkeypatch):
    """Dynamo would run the private model, which has hooks, by the code that it made for the plain one."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    case = record.Case("tiny", tuning, ("plain", "plain_compiled", "ours", "ours_compiled"))
    assert [row["failure"] for row in record.measure_case(case, torch.device("cpu"), rounds=1)] == [""] * 4


@pytest.mark.whole
def test_growth_varies_one_dimension_at_a_time(tiny):
    todo = record.growth_cases("tiny", {"depth": (1, 3), "batch_size": (2,)}, ["plain"])
    assert [(c.shape.depth, c.shape.batch_size) for c in todo] == [(1, 4), (3, 4), (2, 2)]
    rows = record.measure(todo, device="cpu", rounds=1, threads=1)
    assert list(zip(rows.varied, rows.value, strict=True)) == [("depth", 1), ("depth", 3), ("batch_size", 2)]
    assert list(rows.depth) == [1, 3, 2] and list(rows.batch_size) == [4, 4, 2]


@together(
    ("call", "message"),
    [
        (lambda: cases(["vit_huge"]), "models must be among .*vit_base.*, got 'vit_huge'"),
        (lambda: cases(["tiny"], ["norms"]), "tunings must be among full, biases, lora, got 'norms'"),
        (lambda: cases(["tiny"], ["full"], ["fastdp"]), "contenders must be among plain.*, got 'fastdp'"),
        (lambda: cases(["llama2_7b"], ["biases"]), "none of the models llama2_7b can be trained by biases"),
        (lambda: make_workload(MODELS["llama_d256"], "biases"), "tuning must be one of 'full', 'lora' here"),
        (lambda: make_workload(replace(MODELS["tiny"], tokens=18), "full"), "square plus one for a ViT, got 18"),
        (lambda: record.measure([], device="tpu", rounds=1, threads=1), "device must be 'cpu', .*, got 'tpu'"),
        (lambda: record.measure([], device="cpu", rounds=0, threads=1), "rounds must be at least 1, got 0"),
        (lambda: record.measure([], device="cpu", rounds=1, threads=0), "threads must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused_clearly(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_missing_accelerator_is_said_plainly(capsys, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        command.main(["--device", "accelerator"])
    assert stop.value.code == 2
    assert "torch finds none on this machine" in capsys.readouterr().err


@pytest.mark.whole
def test_a_selection_is_measured_shown_and_written_aside(tiny, workspace, capsys):
    arguments = ["--models", "tiny", "--tunings", "biases", "--rounds", "3", "--threads", "1"]
    assert command.main(arguments) == 0
    assert "ours, HyFreeDP K = 10" in capsys.readouterr().out
    assert not workspace.results.exists()

    rows = pd.read_csv(workspace.build / "benchmark" / "efficiency.csv")
    assert list(rows.contender) == list(CONTENDERS)
    assert rows.failure.isna().all()
    assert (rows.seconds_min <= rows.seconds).all() and (rows.seconds <= rows.seconds_max).all()
    for reference in ("plain", "ours"):
        lower, median, upper = (rows[f"ratio_to_{reference}{end}"] for end in ("_q1", "", "_q3"))
        assert (lower <= median).all() and (median <= upper).all()
        assert (median[rows.contender == reference] == 1).all()
    assert (rows.peak_mib > 0).all()
    constant = {"batch_size": 4, "tokens": 5, "rounds": 3, "threads": 1, "device": "cpu", "torch": version("torch")}
    for name, value in constant.items():
        assert (rows[name] == value).all(), name
    work = make_workload(SHAPES["vit"], "biases")
    assert (rows.trainable == sum(p.numel() for p in work.trainable)).all()
    assert rows[["opacus", "timm", "transformers", "peft", "hyfreedp", "hardware", "date"]].notna().all(axis=None)


@pytest.fixture
def elsewhere(workspace, monkeypatch):
    """The command's folders, with all measurements replaced by one that says which case it was."""

    def measured(todo, **kwargs):
        return pd.DataFrame(
            [
                {"model": c.model, "tuning": c.tuning, "varied": c.varied, "value": c.value, "contender": "plain"}
                for c in todo
            ]
        ).assign(seconds=1.0)

    monkeypatch.setattr(command, "measure", measured)
    monkeypatch.setattr(
        command,
        "measure_noise",
        lambda models, **kwargs: pd.DataFrame(
            [dict(what="", model=m, batch_size=1, source="", seconds=1, parameters=1, ratio=1) for m in models]
        ),
    )
    monkeypatch.setattr(
        command,
        "measure_learning",
        lambda models, **kwargs: pd.DataFrame(
            [dict(model=m, method="", ratio=1, copies=0, budget_percent=0) for m in models]
        ),
    )
    return workspace


def test_the_whole_record_has_every_small_model_and_the_growth(elsewhere):
    assert command.main([]) == 0
    folder = elsewhere.results / "laptop"
    rows = pd.read_csv(folder / "efficiency.csv")
    expected = [(model, tuning) for model in workloads.ON_CPU for tuning in MODELS[model].tunings]
    assert list(zip(rows.model, rows.tuning, strict=True)) == expected
    assert len(pd.read_csv(folder / "efficiency_growth.csv")) == sum(map(len, command._GROWTH["laptop"][1].values()))
    for name in ("efficiency_noise", "efficiency_learning"):
        assert tuple(pd.read_csv(folder / f"{name}.csv").model) == workloads.ON_CPU
    assert not elsewhere.build.exists()


@pytest.mark.parametrize("what", ["noise", "learning"])
def test_one_thing_alone_is_measured_on_request(elsewhere, what):
    assert command.main([f"--{what}"]) == 0
    assert [path.name for path in (elsewhere.results / "laptop").iterdir()] == [f"efficiency_{what}.csv"]


def test_noise_and_learning_are_measured_where_all_parameters_can_be_trained(elsewhere):
    """A list of models may hold one that is trained by LoRA alone."""
    for what in ("noise", "learning"):
        assert command.main([f"--{what}", "--models", "llama2_7b", "tiny", "--record"]) == 0
        assert pd.read_csv(elsewhere.results / "laptop" / f"efficiency_{what}.csv").model.tolist() == ["tiny"]


def test_an_interrupted_record_goes_on_where_it_was(elsewhere, monkeypatch, capsys):
    """Case by case: what was measured before the interrupt is written, and left out the next time."""
    done = []

    def measured(todo, **kwargs):
        (case,) = todo
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(str(case))
        place = {"model": case.model, "tuning": case.tuning, "varied": "", "value": 0}
        return pd.DataFrame([place | {"contender": name, "seconds": 0.1 + 0.2} for name in case.contenders])

    monkeypatch.setattr(command, "measure", measured)
    arguments = ["--models", "tiny", "vit_d192", "--contenders", "plain", "--resume"]
    path = elsewhere.results / "laptop" / "efficiency.csv"
    assert command.main(arguments) == 130 and "goes on from here" in capsys.readouterr().out
    first, before = path.read_text(), list(done)
    assert len(pd.read_csv(path)) == 2 and "0.30000000000000004" in first
    done.clear()
    while command.main(arguments) == 130:
        done.clear()
    rows = pd.read_csv(path)
    assert path.read_text().startswith(first) and not set(before) & set(done)
    assert len(rows) == len(cases(["tiny", "vit_d192"], contenders=["plain"])) == len(rows.drop_duplicates())
    assert command.main(arguments) == 0 and path.read_text() == rows.to_csv(index=False)
    capsys.readouterr()
    assert command.main([*arguments[:-1], "--record"]) == 130 and "goes on" not in capsys.readouterr().out


def test_opake_is_measured_on_request_where_it_is_installed(elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", {"opake": None}.get)
    with pytest.raises(SystemExit):
        command.main(["--opake"])
    assert "pip install opake" in capsys.readouterr().err and not elsewhere.results.exists()
    monkeypatch.setattr(command, "find_spec", {"opake": "found"}.get)
    assert command.main(["--opake"]) == 0
    assert [path.name for path in (elsewhere.results / "laptop").iterdir()] == ["efficiency_opake.csv"]


def test_a_contender_that_is_not_installed_is_left_out_with_its_reason(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "opake.dpsgd.clipping", None)
    rows = record.measure(cases(["tiny"], ["full"], ["opake"]), device="cpu", rounds=1, threads=1)
    assert "seconds" not in rows and "opake.dpsgd.clipping" in rows.failure[0]


@pytest.fixture(scope="module")
def learned():
    return learning.measure_learning(["tiny"], device="cpu", rounds=1, threads=1, steps=10).set_index("method")


def test_what_learning_the_rate_costs_is_that_of_whole_runs(learned):
    """Copies: an average, the first weights, and those at hand in a vote; budget: what gradients leave."""
    assert list(learned.index) == list(learning.PRESETS_MEASURED)
    fixed = learned.loc["fixed"]
    assert (fixed.ratio, fixed.copies, fixed.budget_percent) == (1, 0, 0)
    assert learned.copies["hyfreedp_robust"] == pytest.approx(3, abs=1.1) and learned.copies["hyfreedp_paper"] <= 1.1
    assert (learned.budget_percent.drop("fixed").between(0.5, 5)).all()


def test_the_dear_run_of_votes_takes_two_gradients_again(tiny, monkeypatch):
    work = make_workload(SHAPES["vit"], "full")
    step = learning._dear(contenders.private_step(work, Setup(), preset=PRESETS["robust"], steps=10))
    optimizer, calls = step.func.__self__, []
    backward = optimizer.gradient_engine.backward
    monkeypatch.setattr(optimizer.gradient_engine, "backward", lambda *losses: calls.append(1) or backward(*losses))
    start = copy.deepcopy(optimizer.state_dict())
    optimizer._checks_due = []
    for _ in range(2):
        calls.clear()
        learning._run(optimizer, step, start)
        assert (len(calls), optimizer.ledger.repeated) == (12, 0)
        assert [row["step"] for row in optimizer.history if row.get("lost")] == [2, 7]


def test_the_trade_off_shows_every_method_but_the_random_search(learned):
    rows = pd.DataFrame(
        [
            dict(
                task="t",
                model="m",
                tuning="full",
                epsilon=epsilon,
                row=row,
                seed=0,
                accuracy=0.5 + 0.01 * (row != "grid_linear"),
            )
            | {"validation_accuracy": 0.5}
            for row in ROWS
            for epsilon in (1.0, math.inf)
        ]
    )
    found = learning.costs(learned.reset_index(), rows)
    told = learning.findings(found, learned.reset_index())
    assert len(told) == 4 and all("points" in line for line in told[:3])
    figure = learning.draw(found)
    names = {"a search, beside epsilon", "other, without a search", *(ROWS[name].title for name in learning.STYLES)}
    for axis, column in zip(figure.axes, ("time", "percent"), strict=True):
        assert [bar.lines[0].get_xdata()[0] for bar in axis.containers] == pytest.approx(found[column].to_list())
        assert [bar.lines[0].get_ydata()[0] for bar in axis.containers] == pytest.approx(found.gap.to_list())
        assert set(axis.get_legend_handles_labels()[1]) == names
    plt.close(figure)


def test_noise_and_checks_are_timed_beside_their_references(tiny):
    """Every source really adds standard normal noise: one that does not would look fast."""
    for add in noise.sources().values():
        total = torch.full((200_000,), 5.0)
        add([total])
        assert total.mean().item() == pytest.approx(5, abs=0.02) and total.std().item() == pytest.approx(1, abs=0.02)
    rows = noise.measure_noise(["tiny"], device="cpu", rounds=3, numbers=1000)
    assert rows.groupby("what").size().to_dict() == {"check": 2, "noise alone": 5, "step": 3}
    assert (rows[rows.source.isin([noise.REFERENCE, "without"])].ratio == 1).all()
    assert (rows.seconds > 0).all() and (rows.ratio_q1 <= rows.ratio).all() and (rows.ratio <= rows.ratio_q3).all()
    assert NoiseGenerator.add_noise.__qualname__ == "NoiseGenerator.add_noise"


# ---- goals -----------------------------------------------------------------------------------------------------------


def invented_record():
    seconds = {"plain": 1.0, "opacus_hooks": 1.6, "opacus_ghost": 2.0, "ours": 1.25, "ours_k1": 1.9, "ours_k5": 1.35}
    mib = {"plain": 100.0, "opacus_hooks": 150.0, "opacus_ghost": 120.0, "ours": 120.0, "ours_k1": 120.0}
    return pd.DataFrame(
        {
            "model": "m",
            "tuning": "full",
            "contender": list(seconds),
            "ratio_to_plain": list(seconds.values()),
            "ratio_to_ours": [s / seconds["ours"] for s in seconds.values()],
            "peak_mib": [mib.get(name, np.nan) for name in seconds],
        }
    )


def test_goals_are_judged_by_the_right_ratios():
    judged = goals.judge(invented_record()).set_index("goal")
    measured = dict(zip(judged.index, judged.measured, strict=True))
    assert measured == pytest.approx(
        {
            "time, to a plain step": 1.25,
            "time, to Opacus ghost clipping": 0.625,
            "time, to Opacus hooks": 0.78125,
            "peak memory, to a plain step": 1.2,
            "time with HyFreeDP K = 1, to without": 1.52,
            "time with HyFreeDP K = 5, to without": 1.08,
        }
    )
    assert [goal for goal in judged.index if not judged.met[goal]] == [
        "peak memory, to a plain step",
        "time with HyFreeDP K = 1, to without",
    ]


def test_the_summary_counts_models():
    two = pd.concat([invented_record(), invented_record().assign(model="n", peak_mib=100.0)])
    table = goals.summarise(goals.judge(two)).set_index("goal")
    assert table.met["peak memory, to a plain step"] == "1 of 2"
    assert table.met["time, to a plain step"] == "2 of 2"
    assert table["n"]["peak memory, to a plain step"] == 1.0


# ---- the paper's table and its model of the cost ---------------------------------------------------------------------


def test_the_model_of_the_cost_is_the_papers():
    for interval in (1, 5, 10):
        assert tables.interval_ratio(interval, 1 / 3) == pytest.approx((3 + 2 / interval) / 3)
        assert tables.forward_share(tables.interval_ratio(interval, 0.4), interval) == pytest.approx(0.4)
    assert tables.interval_ratio(10, 1 / 3) < 1.07  # "less than 7 % overhead"


def test_measurements_stand_beside_the_papers_rows():
    frame = pd.DataFrame(
        {"model": "vit_d384", "tuning": ["full", "biases"], "contender": "ours_k5", "ratio_to_ours": [1.1, 1.2]}
    ).assign(device="cpu")
    table = tables.beside_paper(paper.load("eff"), {"mine": frame, "none": None})
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
    np.testing.assert_array_equal(tables.memory_ratio(rows), [1.5, 1, 1, np.nan, np.nan])


def test_every_stand_in_exists_and_allows_its_tuning():
    for stand_ins in tables.PAPER_CASES.values():
        for device, (model, tuning) in stand_ins.items():
            assert model in (workloads.ON_CPU if device == "cpu" else workloads.ON_GPU)
            assert tuning in MODELS[model].tunings


@pytest.mark.whole
def test_a_notebook_measures_each_case_once(tiny, tmp_path):
    settings = {"contenders": ["plain"], "rounds": 1, "threads": 1, "device": "cpu"}
    first = tables.measure_once(tmp_path, [("tiny", "lora")], **settings)
    both = tables.measure_once(tmp_path, [("tiny", "biases"), ("tiny", "lora")], **settings)
    assert list(both.tuning) == ["biases", "lora"]
    assert both.seconds[1] == first.seconds[0]
    growth = tables.measure_growth_once(tmp_path, "tiny", {"depth": [1], "batch_size": [2]}, **settings)
    assert list(growth.varied) == ["depth", "batch_size"]
