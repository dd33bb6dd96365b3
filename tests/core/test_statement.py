"""A privacy statement says what the run did; several runs cost what a second library says."""

import json
import math
import re

import pytest
import torch
from cases import each
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from twins import by_hand, make_data, make_model, make_private, steps, train

from hyfreedp import PrivacyEngine, Statement, calibrate_noise, total_epsilon
from hyfreedp.__main__ import main
from hyfreedp.accounting.composition import releases

BUDGET = {"target_epsilon": 3.0, "target_delta": 1e-4}


def trained(until=None, **settings):
    """The optimizer of a run on 40 records, or its first steps."""
    _, optimizer, loader = make_private(**(BUDGET | {"batch_size": 8} | settings))
    train(optimizer, loader, until=until)
    return optimizer


def planned(steps=20, made=None, unit="record", sampled=True, **plan):
    """A statement of a plan that nobody ran."""
    plan = {"sample_rate": 0.1, **BUDGET} | plan
    split = calibrate_noise(steps=steps, **plan)
    return Statement(
        split=split,
        steps=steps if made is None else made,
        unit=unit,
        number=40,
        sampled=sampled,
        clipping="AutomaticClipping(stability=0.01)",
        noise="standard",
    )


# -- what it says ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["robust", "paper", "fixed"])
def test_it_has_the_numbers_of_the_run_so_far(preset):
    optimizer = trained(4, preset=preset)
    statement = optimizer.statement()
    assert (statement.steps, statement.number, statement.unit) == (4, 40, "record")
    for delta in (1e-4, 1e-5, 1e-6):
        assert statement.epsilon(delta) == optimizer.epsilon_spent(delta)
    text = str(statement)
    epsilon = float(re.match(r"# Differentially private: epsilon (\S+) at delta 0.0001, of one record\n", text)[1])
    assert optimizer.epsilon_spent() <= epsilon < 1.001 * optimizer.epsilon_spent()
    assert f"epsilon is then the plan's, {3 if preset == 'fixed' else ''}" in text
    assert ("How the learning rate was found" in text) == (preset == "fixed")
    assert f"{optimizer.split.sigma_gradient:.6g}" in text and "AutomaticClipping(stability=0.01)" in text


def test_a_run_without_a_guarantee_says_so_in_its_first_line_and_has_no_epsilon():
    with pytest.warns(UserWarning, match="a tuned constant rate, by preset='fixed', is better"):
        without_noise, own_batches = trained(target_epsilon=math.inf).statement(), by_hand(**BUDGET)
    steps(own_batches, [8])
    for statement, why in ((without_noise, "nothing was noised"), (own_batches.statement(), "not Poisson samples")):
        first, *rest = str(statement).splitlines()
        assert first.startswith("# NO privacy guarantee: ") and why in first
        assert statement.epsilon() == statement.rho == math.inf and "Epsilon" not in "".join(rest)
        with pytest.raises(ValueError, match=f"run 2 has no guarantee, so all runs together have none: .*{why}"):
            total_epsilon([planned(), statement], 1e-4)


def test_a_target_that_noise_made_elsewhere_does_not_keep_is_told_beside_the_counted_epsilon():
    split = calibrate_noise(sample_rate=0.2, steps=10, **BUDGET | {"target_epsilon": 6.0})
    claimed = split.__class__(**{**vars(split), "target_epsilon": 3.0})
    with pytest.warns(UserWarning, match="split was made elsewhere"):
        text = str(trained(split=claimed).statement())
    assert re.match(r"# Differentially private: epsilon (6|5\.99\d*) ", text)
    assert "| Target | epsilon 3, **not kept**" in text


def test_the_unit_is_the_owner_or_the_records_of_a_person():
    owners = trained(owners=[row // 2 for row in range(40)], records_per_owner=1).statement()
    assert owners.number == 20 and "of one owner with all their records" in owners.headline
    assert "of one person's 3 records" in trained(1, records_per_person=3).statement().headline


def test_zcdp_is_that_of_each_gaussian_alone():
    """k^2 / (2 sigma^2) for each release; and no smaller than what dp-accounting's order 2 makes of it."""
    for k in (1, 3):
        statement = planned(records_per_person=k)
        accountant = RdpAccountant([2.0, 32.0])
        for sigma, count in releases(statement.split, 20):
            accountant.compose(SelfComposedDpEvent(GaussianDpEvent(sigma / k), count))
        assert accountant._rdp / [2.0, 32.0] == pytest.approx(statement.rho)
    assert planned(made=0).rho == planned(made=0).epsilon() == 0


def test_answers_are_filled_in_and_others_refused():
    filled = planned().fill(tuned="Nothing.").fill(data="Digits.")
    assert "the best of several runs)? **Nothing.**" in str(filled) and "**Digits.**" in str(filled)
    with pytest.raises(ValueError, match=r"each name of answers must be .*, got 'tunedd'; did you mean 'tuned'"):
        filled.fill(tunedd="Nothing.")


# -- as JSON, in checkpoints, by the command ---------------------------------------------------------------------------


@each(preset=["robust", "paper", "fixed"], target=[3.0, math.inf])
def test_json_is_strict_and_comes_back(preset, target):
    statement = trained(3, preset=preset, target_epsilon=target).statement().fill(data="Made up.")
    read = json.loads(statement.to_json(), parse_constant=pytest.fail)
    assert read["headline"] == statement.headline and read["guarantee"] == (target == 3.0)
    assert [float(row["epsilon"]) for row in read["epsilons"]] == [statement.epsilon(d) for d in statement.deltas]
    assert Statement.from_json(statement.to_json()) == statement


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampled": "no"}, "a privacy statement of hyfreedp, which it is not: .*sampled must be True or False"),
        ({"split": planned().split.to_dict() | {"sigma_gradient": -1.0}}, "sigma_gradient must be in"),
        ({"split": {}}, "a privacy statement of hyfreedp, which it is not: KeyError"),
    ],
)
def test_a_damaged_statement_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Statement.from_dict(planned().to_dict() | change)
    with pytest.raises(ValueError, match="must be a privacy statement of hyfreedp"):
        Statement.from_json("[1]")


def test_the_command_reads_checkpoints_and_json(tmp_path, capsys):
    optimizer, other = trained(3), trained(seed=1)
    checkpoint, text = tmp_path / "run.pt", tmp_path / "other.json"
    PrivacyEngine().save_checkpoint(path=checkpoint, module=optimizer.module, optimizer=optimizer)
    text.write_text(other.statement().to_json())
    main(["statement", str(checkpoint)])
    assert capsys.readouterr().out == str(optimizer.statement()) + "\n"
    main(["statement", str(text), "--json"])
    assert Statement.from_json(capsys.readouterr().out) == other.statement()
    main(["total", str(checkpoint), str(text), "--delta", "1e-4", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["epsilon"] == total_epsilon([optimizer, other], 1e-4) < sum(told["of_each"])
    main(["total", str(checkpoint), str(text), "--delta", "1e-4"])
    assert f"{told['epsilon']:.6f}  all together at delta 0.0001, of one record" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent", None, "No such file"),
        ("text", b"hello", "must hold a statement's JSON, or be a checkpoint with a statement"),
        ("weights", {"weight": torch.zeros(2)}, "must hold a statement's JSON, or be a checkpoint with a statement"),
    ],
)
def test_a_file_without_a_statement_is_one_line_and_status_2(name, content, message, tmp_path, capsys):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    for command in (["statement", str(path)], ["total", str(path), "--delta", "1e-5"]):
        with pytest.raises(SystemExit) as stopped:
            main(command)
        told = capsys.readouterr()
        assert stopped.value.code == 2 and told.out == "" and told.err.count("\n") == 1 and message in told.err


# -- several runs ------------------------------------------------------------------------------------------------------


def by_dp_accounting(statements, delta):
    """The same composition by dp-accounting's own accountant and events."""
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for one in statements:
        for sigma, count in releases(one.split, one.steps):
            if count:
                event = PoissonSampledDpEvent(one.split.sample_rate, GaussianDpEvent(sigma))
                accountant.compose(SelfComposedDpEvent(event, count))
    return accountant.get_epsilon(delta)


SEARCH = [planned(probe="none", target_epsilon=epsilon) for epsilon in (1.0, 1.0, 2.0)]
MIXED = [planned(made=7), planned(probe="losses", sample_rate=0.02, steps=40), planned(target_epsilon=0.5, steps=9)]


@pytest.mark.parametrize("runs", [SEARCH, MIXED, [planned()]], ids=["search", "mixed", "one"])
def test_the_total_is_that_of_dp_accounting_and_below_the_sum(runs):
    total = total_epsilon(runs, 1e-4)
    assert total == pytest.approx(by_dp_accounting(runs, 1e-4), rel=2e-3)
    sum_at_the_same_total_delta = sum(run.epsilon(1e-4 / len(runs)) for run in runs)
    assert len(runs) == 1 or total < 0.8 * sum_at_the_same_total_delta
    assert len(runs) > 1 or total == pytest.approx(runs[0].epsilon(1e-4), rel=1e-6)


@pytest.mark.parametrize("delta", [1e-3, 1e-8])
def test_the_total_does_not_depend_on_the_order_and_grows_with_every_run(delta):
    runs = [planned(made=count) for count in (0, 5, 20)]
    total = total_epsilon(runs, delta)
    assert total_epsilon(runs[::-1], delta) == pytest.approx(total, rel=1e-9)
    assert total_epsilon(runs[1:], delta) == pytest.approx(total, rel=1e-9)
    assert 0 == total_epsilon(runs[:1], delta) < total_epsilon(runs[:2], delta) < total_epsilon(runs[2:], delta) < total


def test_the_records_of_a_person_are_counted_in_every_run():
    """Two runs of k = 2 records: one run of twice the steps."""
    half = planned(steps=40, made=20, records_per_person=2, probe="none")
    assert total_epsilon([half, half], 1e-4) == pytest.approx(half.split.epsilon, rel=1e-4)


def test_runs_that_do_not_compose_are_refused():
    with pytest.raises(ValueError, match="run 1 protects one record and run 2 one owner with all their records"):
        total_epsilon([planned(), planned(unit="owner")], 1e-4)
    with pytest.raises(ValueError, match="run 1 protects one record and run 3 one person's 2 records"):
        total_epsilon([planned(), planned(), planned(records_per_person=2)], 1e-4)
    first, again = trained(seed=5), trained(seed=5)
    with pytest.raises(ValueError, match="draw batches by different seeds, but two have one"):
        total_epsilon([first, again], 1e-4)
    engine = PrivacyEngine(seed=5)
    pair = [trained(model=make_model(), data=make_data(), engine=engine) for _ in range(2)]
    assert total_epsilon(pair, 1e-4) == total_epsilon([one.statement() for one in pair], 1e-4)
    for wrong in ([], None, "runs", [3], planned()):
        with pytest.raises(TypeError, match="runs must be"):
            total_epsilon(wrong, 1e-4)
    with pytest.raises(ValueError, match=r"delta must be in \(0, 1\), got 2"):
        total_epsilon([planned()], 2)
