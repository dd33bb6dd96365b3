"""Cells are reproducible, whole or absent, never trained twice and resumable; tables say what the records say."""

import math

import pandas as pd
import pytest
import torch

from hyfreedp import HyFreeDPOptimizer
from hyfreedp.experiments.accounting_of_the_paper import SOUND, Counting
from hyfreedp.experiments.runs import train
from hyfreedp.experiments.runs.cells import Spec, read_steps, run_cell
from hyfreedp.experiments.runs.train import make_run
from hyfreedp.experiments.studies import loss_noise
from hyfreedp.experiments.tables import small_tasks
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.experiments.tasks.scores import evaluate, losses_of
from hyfreedp.gradients import AbadiClipping

QUICK = Spec(method="robust", epsilon=1.0, steps=12)
OTHERS = (
    Spec(method="adaptive", epsilon=1.0, learning_rate=0.01, clipping_threshold=0.1, steps=12),
    Spec(method="prodigy", learning_rate=1.0, epsilon=math.inf, steps=12),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of cells that were trained without an interruption."""
    return tmp_path_factory.mktemp("whole")


@pytest.mark.parametrize("spec", [QUICK, *(pytest.param(spec, marks=pytest.mark.whole) for spec in OTHERS)])
def test_a_killed_cell_resumes_to_the_same_record(whole, tmp_path, monkeypatch, spec):
    reference = run_cell(spec, whole)
    monkeypatch.setattr(train, "CHECKPOINT_SECONDS", 0.0)
    calls = 0
    step = HyFreeDPOptimizer.step

    def dies_at_step_seven(self, *args):
        nonlocal calls
        calls += 1
        if calls == 7:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(HyFreeDPOptimizer, "step", dies_at_step_seven)
    with pytest.raises(KeyboardInterrupt):
        run_cell(spec, tmp_path / "killed")
    assert not list((tmp_path / "killed").glob("*.json"))
    resumed = run_cell(spec, tmp_path / "killed")
    assert calls == 7 + 6  # steps 1 to 6 were not trained again
    assert resumed | {"seconds": 0} == reference | {"seconds": 0}
    pd.testing.assert_frame_equal(read_steps(spec, tmp_path / "killed"), read_steps(spec, whole))
    assert not list((tmp_path / "killed").glob("*.ckpt"))


def test_a_run_has_the_optimizer_and_the_threshold_of_its_spec():
    optimizer, _ = make_run(Spec(method="vanilla", base="sgd", learning_rate=0.2, clipping_threshold=0.3))
    assert optimizer.gradient_engine.clipping == AbadiClipping(0.3)
    (group,) = optimizer.base.param_groups
    assert (group["lr"], group["momentum"], optimizer.eta) == (0.2, 0.9, 0.2)


@pytest.mark.filterwarnings("ignore:split was made elsewhere")
def test_a_claimed_run_has_the_noise_of_algorithm_2_and_tells_what_it_really_spends():
    settings = {"task": "digits", "epsilon": 8.0, "interval": 5, "steps": 100}
    (claimed, _), (sound, _) = (make_run(Spec(method=method, **settings)) for method in ("paper_claimed", "paper"))
    assert sound.guarantee and claimed.guarantee == (claimed.split.epsilon <= 8)
    assert Counting("rdp", "independent").epsilon(claimed.split) == pytest.approx(8.0, rel=1e-5)
    assert claimed.split.epsilon == pytest.approx(SOUND.epsilon(claimed.split), rel=1e-6)
    bare, _ = make_run(Spec(method="paper_noiseless_losses", **settings))
    assert bare.split.sigma_gradient == claimed.split.sigma_gradient and not bare.guarantee
    assert bare.split.sigma_loss == claimed.split.sigma_loss / 1e6
    recorded = loss_noise.recorded().loc["digits, MLP", 8.0]
    assert 100 * claimed.split.sigma_loss / 500 == pytest.approx(recorded.claimed_percent, rel=1e-4)
    assert 100 * sound.split.sigma_loss / 500 == pytest.approx(recorded.sound_percent, rel=1e-4)
    free, _ = make_run(Spec(method="paper_claimed", **settings | {"epsilon": float("inf")}))
    assert free.split.sigma_loss == 0


@pytest.mark.parametrize("task", [TASKS["digits"], TASKS["classification"]])
def test_validation_never_touches_the_test_part(task):
    train, test = task.datasets("test")
    fit, held_out = task.datasets("validation")
    assert len(train) == task.train_size and len(fit) + len(held_out) == task.train_size
    assert torch.equal(torch.cat([fit.tensors[0], held_out.tensors[0]]), train.tensors[0])
    assert len(test) > 0


def test_scores_are_the_share_of_correct_predictions_and_the_mean_loss():
    train, _ = TASKS["digits"].datasets("test")
    x, y = train.tensors
    model = torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.Dropout(0.5)).train()
    logits, scores = model[0](x), evaluate(model, train)
    assert scores.accuracy == pytest.approx((logits.argmax(1) == y).float().mean().item()) and model.training
    surprise = -logits.log_softmax(dim=1)[torch.arange(len(y)), y]
    assert scores.loss == pytest.approx(surprise.mean().item())


def test_a_validation_record_also_has_the_test_accuracy_of_its_own_model(tmp_path):
    spec = Spec(method="linear", learning_rate=0.02, steps=10, evaluation="validation")
    record = run_cell(spec, tmp_path)
    optimizer, loader = make_run(spec)
    while optimizer.steps_left:
        for batch in loader:
            optimizer.step(losses_of(optimizer.module), batch)
    for name, part in (("accuracy", "validation"), ("test_accuracy", "test")):
        assert record[name] == evaluate(optimizer.module, TASKS["digits"].datasets(part)[1]).accuracy


def test_keys_tell_specs_apart_and_stay_what_they_were():
    assert len({spec.key for spec in small_tasks.specs()}) == len(small_tasks.specs())
    assert Spec(method="linear", learning_rate=0.02).key == "f1c1096d8167cc61"
    assert Spec(base="sgd").key != Spec().key


def test_every_folder_lies_in_the_repository_that_the_environment_names(workspace, tmp_path):
    assert all(folder.is_relative_to(tmp_path) for folder in vars(workspace).values())
