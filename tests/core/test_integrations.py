"""Other libraries' loops: a run by them is, bit for bit, the run by hand, and tells nothing that is not private."""

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from cases import together
from torch import nn
from torch.utils.data import DataLoader, Dataset
from twins import cross_entropy, flat, make_data, make_private

from hyfreedp import PrivacyEngine

OF_LIGHTNING = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:`isinstance.treespec, LeafSpec")  # its advice
STEPS, SIZE = 10, 8  # two epochs of 40 records
PRIVACY = {"target_epsilon": 3.0, "target_delta": 1e-3, "accountant": "rdp"}


def layers() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 3))


def by_hand(model, base, loss, data, collate=None, weights=None, **privacy):
    """The same run by the loop of the README."""
    torch.manual_seed(3)
    model.train()
    loader = DataLoader(data, batch_size=SIZE, collate_fn=collate)
    _, optimizer, loader = make_private(model, base, loader=loader, steps=STEPS, **(PRIVACY | privacy))
    for _ in range(2):
        for batch in loader:
            optimizer.step(loss, batch, weights=weights)
    return flat(model), optimizer


# -- transformers ------------------------------------------------------------------------------------------------------


class Named(Dataset):
    """The records as transformers' Trainer has them, in float32."""

    def __init__(self) -> None:
        self.x, self.y = make_data().tensors

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return {"x": self.x[index].float(), "labels": self.y[index], "name": "not for the model"}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def floating_point_ops(self, inputs):
        """As a model of transformers counts them."""
        return len(inputs["labels"])


def losses(model, batch):
    return F.cross_entropy(model(batch["x"])["logits"], batch["labels"], reduction="none")


@pytest.fixture
def trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from hyfreedp.integrations.transformers import PrivateTrainer

    def make(privacy=None, weights=None, **arguments):
        torch.manual_seed(3)
        defaults = {"output_dir": str(tmp_path), "per_device_train_batch_size": SIZE, "num_train_epochs": 2, "seed": 3}
        defaults |= {"report_to": [], "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
        return PrivateTrainer(
            per_sample_loss=losses,
            privacy=PRIVACY | (privacy or {}),
            weights=weights,
            engine=PrivacyEngine(seed=0),
            model=Classifier(),
            args=transformers.TrainingArguments(**(defaults | arguments)),
            train_dataset=Named(),
            eval_dataset=Named(),
        )

    return make


def collate(records):
    return {name: torch.stack([record[name] for record in records]) for name in ("x", "labels")}


SEARCHING = {"preset": "paper", "interval": 2, "max_physical_batch_size": 3}


@pytest.mark.parametrize(
    ("privacy", "weights"),
    [({}, None), (SEARCHING, lambda batch: 1 / (1 + batch["labels"]))],
    ids=["plain", "weighted"],
)
def test_the_trainer_of_transformers_makes_the_run_by_hand(trainer, privacy, weights):
    found = trainer(privacy, weights)
    base = found.create_optimizer()  # transformers' own AdamW, with its groups
    found.train()
    model = Classifier()
    groups = [{**group, "params": []} for group in base.param_groups]
    names = {id(p): name for name, p in found.model.named_parameters()}
    for group, old in zip(groups, base.param_groups, strict=True):
        group["params"] = [dict(model.named_parameters())[names[id(p)]] for p in old["params"]]
        group["lr"] = found.args.learning_rate
    expected, optimizer = by_hand(
        model, torch.optim.AdamW(groups), lambda batch: losses(model, batch), Named(), collate, weights, **privacy
    )
    assert torch.equal(flat(found.model), expected)
    assert repr(found.private.history) == repr(optimizer.history)
    assert found.state.global_step == STEPS and found.private.steps_left == 0


RAW = {"loss", "train_loss", "grad_norm", "total_flos"}


def test_what_the_trainer_tells_is_private(trainer, tmp_path):
    """Epsilon and the rate; neither a loss of a training batch nor how large it was. Evaluation is the user's."""
    found = trainer(eval_strategy="epoch", save_strategy="epoch")
    result = found.train()
    training = [row for row in found.state.log_history if "eval_loss" not in row]
    assert len(training) == STEPS + 1 and not any(RAW & row.keys() for row in training)
    epsilons = [row["epsilon"] for row in training]
    assert epsilons == sorted(epsilons) and 2.9 < epsilons[-1] <= 3.0
    rates = [row["learning_rate"] for row in training[:-1]]
    assert rates == pytest.approx([row["eta"] for row in found.private.history])
    assert result.training_loss is None and not RAW & result.metrics.keys()
    assert result.metrics["epsilon"] == epsilons[-1] and any("eval_loss" in row for row in found.state.log_history)
    saved = json.loads((tmp_path / "checkpoint-10" / "trainer_state.json").read_text())
    assert saved["total_flos"] == 0 and not any(RAW & row.keys() for row in saved["log_history"])
    with pytest.raises(RuntimeError, match="has trained its private run"):
        found.train()


def test_a_checkpoint_of_the_trainer_goes_on_bit_for_bit(trainer, tmp_path):
    whole = trainer()
    whole.train()
    first = trainer(save_strategy="steps", save_steps=3)
    first.train()
    resumed = trainer()
    torch.manual_seed(99)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert torch.equal(flat(resumed.model), flat(whole.model))
    assert repr(resumed.private.history) == repr(whole.private.history)


def test_a_checkpoint_without_the_private_optimizer_is_not_gone_on_with(trainer, tmp_path):
    """Its steps would be counted as none."""
    trainer(save_strategy="steps", save_steps=3, save_only_model=True).train()
    with pytest.raises(
        RuntimeError, match=r"the trainer is at step 3 and the private optimizer at step 0: .*optimizer"
    ):
        trainer().train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


OTHER = {"train_sampling_strategy": "group_by_length", "debug": ["underflow_overflow"], "fsdp": "full_shard"}
OTHER |= {"dataloader_in_order": False, "max_grad_norm": 0.0, "lr_scheduler_type": "cosine", "data_seed": 0}
OTHER |= {"include_num_input_tokens_seen": "all", "neftune_noise_alpha": 0.0}


def test_arguments_that_would_change_nothing_are_refused(trainer):
    """Each of them alone, and with it what to do; where the rate is fixed, its arguments are followed."""
    from hyfreedp.integrations.transformers import OF_A_FIXED_RATE, REFUSED, PrivateTrainer

    plain = trainer()  # all of them as they are
    known = {field.name for field in dataclasses.fields(plain.args)}
    for name in known & {*REFUSED, *OF_A_FIXED_RATE}:
        old = getattr(plain.args, name)
        other = OTHER.get(name, not old if isinstance(old, bool) else (old or 1) * 2)
        arguments = {"per_sample_loss": losses, "model": plain.model, "args": plain.args}
        setattr(plain.args, name, other)
        with pytest.raises(ValueError, match=rf"{name} must be left (at .*|unset), got .*: \w+") as refusal:
            PrivateTrainer(privacy=PRIVACY, **arguments)
        if name in OF_A_FIXED_RATE:
            assert "'preset': 'fixed'" in str(refusal.value)
            PrivateTrainer(privacy=PRIVACY | {"preset": "fixed"}, **arguments)
        setattr(plain.args, name, old)
    with pytest.raises(ValueError, match="optimizers must have None for the scheduler: the learning rate is"):
        PrivateTrainer(privacy=PRIVACY, optimizers=(None, torch.optim.lr_scheduler.LRScheduler), **arguments)
    with pytest.raises(ValueError, match="hold the key of all noise"):
        trainer(push_to_hub=True, hub_strategy="all_checkpoints", hub_token="none")


# -- Lightning ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def lightning(tmp_path):
    pytest.importorskip("lightning")
    import lightning.pytorch as library

    from hyfreedp.integrations.lightning import PrivateModule

    class Module(PrivateModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers().double()

        def forward(self, x):
            return self.layers(x)

        def per_sample_loss(self, batch):
            return cross_entropy(self)(batch)

    def make(privacy=None, weights=None, **arguments):
        torch.manual_seed(3)
        module = Module()
        base = torch.optim.AdamW(module.parameters(), lr=0.1)
        data = DataLoader(make_data(), batch_size=SIZE)
        settings = PRIVACY | {"steps": STEPS} | (privacy or {})
        loader = module.make_private(base, data, weights=weights, engine=PrivacyEngine(seed=0), **settings)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        quiet |= {"enable_model_summary": False, "accelerator": "cpu", "default_root_dir": tmp_path, "max_epochs": 2}
        return module, loader, library.Trainer(**(quiet | arguments))

    return make


@OF_LIGHTNING
@pytest.mark.parametrize(
    ("privacy", "weights"), [({}, None), (SEARCHING, lambda batch: 1 / (1 + batch[1]))], ids=["plain", "weighted"]
)
def test_the_trainer_of_lightning_makes_the_run_by_hand(lightning, privacy, weights):
    module, loader, trainer = lightning(privacy, weights)
    trainer.fit(module, loader)
    model = layers().double()
    base = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected, optimizer = by_hand(model, base, cross_entropy(model), make_data(), None, weights, **privacy)
    assert torch.equal(flat(module), expected)
    assert repr(module.private.history) == repr(optimizer.history)
    assert trainer.global_step == STEPS and module.private.steps_left == 0
    assert trainer.callback_metrics.keys() == trainer.progress_bar_metrics.keys() == {"epsilon", "learning_rate"}
    assert math.isclose(float(trainer.callback_metrics["learning_rate"]), optimizer.history[-1]["eta"], rel_tol=1e-6)
    assert 2.9 < float(trainer.callback_metrics["epsilon"]) <= 3.0


@OF_LIGHTNING
def test_a_checkpoint_of_lightning_goes_on_bit_for_bit(lightning, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    module, loader, trainer = lightning()
    trainer.fit(module, loader)
    saving = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, "run", every_n_train_steps=5)]}
    first, its_loader, its_trainer = lightning(max_steps=5, **saving)
    its_trainer.fit(first, its_loader)
    assert first.private.ledger.steps == 5
    resumed, its_loader, its_trainer = lightning(**saving)
    torch.manual_seed(99)
    its_trainer.fit(resumed, its_loader, ckpt_path=tmp_path / "run.ckpt")
    assert torch.equal(flat(resumed), flat(module))
    assert repr(resumed.private.history) == repr(module.private.history)


# -- accelerate --------------------------------------------------------------------------------------------------------


@together("which", ["optimizer", "loader", "all three"])
def test_accelerate_does_not_wrap_what_is_private(which):
    """Its optimizer could not be stepped, and in several processes its loader would give each another step's batch."""
    accelerate = pytest.importorskip("accelerate")
    model = layers().double()
    wired = make_private(model, torch.optim.AdamW(model.parameters()), **PRIVACY)
    given = {"optimizer": wired[1:2], "loader": wired[2:], "all three": wired}[which]
    with pytest.raises(TypeError, match=r"accelerator.prepare must not be given a private .*Leave out prepare"):
        accelerate.Accelerator(cpu=True).prepare(*given)
    for batch in wired[2]:
        wired[1].step(cross_entropy(model), batch)  # nothing has happened to it
    assert wired[1].steps_left == STEPS // 2


@together("name", ["training_step", "configure_optimizers"])
def test_a_module_with_a_step_of_its_own_is_refused(name):
    """A resumed run would not know what was spent, or train without privacy."""
    lightning = pytest.importorskip("hyfreedp.integrations.lightning")
    kind = type("Own", (lightning.PrivateModule,), {name: lambda *_: None, "per_sample_loss": lambda *_: None})
    with pytest.raises(TypeError, match=f"must not have a {name} of its own"):
        kind().make_private(None, None)
