"""Other libraries' loops: a run by them is, bit for bit, the run by hand, and tells nothing that is not private."""

import copy
import dataclasses
import json
import math
import os
import shutil
import stat
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from twins import Made, cross_entropy, flat, make_data, make_private

from hyfreedp import PrivacyEngine
from hyfreedp.__main__ import main

OF_LIGHTNING = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:`isinstance.treespec, LeafSpec")  # its advice
STEPS, SIZE = 10, 8  # two epochs of 40 records
PRIVACY = {"target_epsilon": 3.0, "target_delta": 1e-3}


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


def told(state):
    """What a saved state of the optimizer holds, less noised sums and what is computed from them."""
    state = {**state, "base_optimizer": state["base_optimizer"]["param_groups"], "model": sorted(state["model"])}
    return state | {"ledger": {**state["ledger"], "released": len(state["ledger"]["released"])}}


def check_the_key_lies_alone(folder, private):
    """Keys of noise and sampling are in no file but one, in any form in which a number is written."""
    key, seed = bytes.fromhex(private.state_dict()["generator"]["key"]), private.sampler.seed
    forms = [key, key[::-1], key.hex().encode(), str(int.from_bytes(key)).encode()]
    forms += [str(seed).encode(), f"{seed:x}".encode(), seed.to_bytes(32), seed.to_bytes(32, "little")]
    held = [file for file in folder.rglob("*") if file.is_file() and any(form in file.read_bytes() for form in forms)]
    assert [file.parent for file in held] == [folder] and held[0].name.startswith("_hyfreedp-")
    assert stat.S_IMODE(held[0].stat().st_mode) == 0o600
    return held[0]


@pytest.fixture
def open_umask():
    """Under which every file is for everybody, unless it says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


# -- transformers ------------------------------------------------------------------------------------------------------


def texts(size: int = 40, first: int = 8) -> Made:
    """Texts of eight words, but for the first, as transformers' Trainer has them."""
    rows = [(torch.arange(8 if row else first) + row) % 20 for row in range(size)]
    return Made(size, lambda i: {"input_ids": rows[i], "labels": torch.tensor(i % 3), "name": "not for the model"})


class Reader(nn.Module):
    main_input_name = "input_ids"
    config = None

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words, self.drop, self.head = nn.Embedding(20, 4, padding_idx=0), nn.Dropout(0.2), nn.Linear(4, 3)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.drop(self.words(input_ids)).mean(dim=1))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def get_input_embeddings(self):
        return self.words

    def num_parameters(self, exclude_embeddings=False):
        """By which the Trainer counts operations."""
        return 1


def padded(records):
    rows = nn.utils.rnn.pad_sequence([record["input_ids"] for record in records], batch_first=True)
    return {"input_ids": rows, "labels": torch.stack([record["labels"] for record in records])}


def own_loss(model, record):
    return F.cross_entropy(model(record["input_ids"])["logits"], record["labels"])


@pytest.fixture
def trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from hyfreedp.integrations.transformers import PrivateTrainer

    def make(privacy=None, weights=None, engine=0, given=None, kind=PrivateTrainer, **arguments):
        torch.manual_seed(3)
        defaults = {"output_dir": str(tmp_path), "per_device_train_batch_size": SIZE, "num_train_epochs": 2, "seed": 3}
        defaults |= {"report_to": [], "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
        parts = {"model": Reader(), "train_dataset": texts(), "eval_dataset": texts(), "data_collator": padded}
        return kind(
            privacy=PRIVACY | (privacy or {}),
            weights=weights,
            engine=PrivacyEngine(seed=engine),
            args=transformers.TrainingArguments(**(defaults | arguments)),
            **(parts | (given or {})),
        )

    return make


SEARCHING = {"preset": "paper", "interval": 2, "max_physical_batch_size": 3}


@pytest.mark.parametrize(
    ("privacy", "weights", "given"),
    [({}, None, {}), (SEARCHING, lambda record: 1 / (1 + record["labels"]), {"loss": own_loss})],
    ids=["plain", "weighted"],
)
def test_the_trainer_of_transformers_makes_the_run_by_hand(trainer, privacy, weights, given):
    found = trainer(privacy, weights, given=given)
    base = found.create_optimizer()  # transformers' own AdamW, with its groups
    found.train()
    model = Reader()
    groups = [{**group, "params": []} for group in base.param_groups]
    names = {id(p): name for name, p in found.model.named_parameters()}
    for group, old in zip(groups, base.param_groups, strict=True):
        group["params"] = [dict(model.named_parameters())[names[id(p)]] for p in old["params"]]
        group["lr"] = found.args.learning_rate
    expected, optimizer = by_hand(
        model, torch.optim.AdamW(groups), lambda record: own_loss(model, record), texts(), padded, weights, **privacy
    )
    assert torch.equal(flat(found.model), expected)
    assert repr(found.private.history) == repr(optimizer.history)
    assert found.state.global_step == STEPS and found.private.steps_left == 0


@pytest.mark.filterwarnings("ignore:mine is not logged")
def test_other_losses_of_the_trainer_are_those_of_one_record(trainer, unbound_noise):
    """Smoothed by its arguments, by ``compute_loss_func``, or by the user's method, which logs in vain."""
    from hyfreedp.integrations.transformers import PrivateTrainer

    def smooth(outputs, labels, **_):
        return F.cross_entropy(outputs["logits"], labels, label_smoothing=0.1)

    class Logging(PrivateTrainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            loss = smooth(model(inputs["input_ids"]), inputs["labels"])
            self.log({"mine": loss})
            return loss

    runs = [
        trainer(given={"loss": lambda model, record: smooth(model(record["input_ids"]), record["labels"])}),
        trainer(label_smoothing_factor=0.1),
        trainer(given={"compute_loss_func": smooth}),
        trainer(kind=Logging),
    ]
    for run in runs:
        run.train()
    for run in runs[1:]:
        torch.testing.assert_close(flat(run.model), flat(runs[0].model), rtol=1e-4, atol=1e-6)
        assert not any("mine" in row for row in run.state.log_history)
    with pytest.raises(ValueError, match=r"label_smoothing_factor must be left at 0.0, got 0.1: smooth in your loss"):
        trainer(given={"loss": own_loss}, label_smoothing_factor=0.1)


def test_one_long_record_is_not_told_by_the_trainer(trainer, tmp_path, monkeypatch):
    """All records in every batch, and one of them long, or not: whatever is not a noised sum must be the same."""
    handler = pytest.importorskip("transformers.trainer_callback").CallbackHandler
    call, seen, found = handler.call_event, [], []

    def watched(self, event, args, state, control, **given):
        """What callbacks are told, but for the objects of the run."""
        plain = {key: value for key, value in given.items() if isinstance(value, dict | float | int | str)}
        seen.append(repr((event, state, control, plain)))
        return call(self, event, args, state, control, **given)

    monkeypatch.setattr(handler, "call_event", watched)
    for length in (8, 400):
        folder, given = tmp_path / str(length), {"train_dataset": texts(16, length), "eval_dataset": None}
        seen.clear()
        arguments = {"per_device_train_batch_size": 16, "output_dir": str(folder), "save_strategy": "epoch"}
        run = trainer({"preset": "fixed"}, given=given, **arguments)
        assert run.train().metrics == {"epsilon": run.private.epsilon_spent()}
        checkpoint = folder / "checkpoint-2"
        names = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*"))]
        parts = {name: repr(torch.load(checkpoint / name)) for name in ("scheduler.pt",)}
        parts["rng_state.pth"] = (checkpoint / "rng_state.pth").read_bytes()
        parts["optimizer.pt"] = repr(told(torch.load(checkpoint / "optimizer.pt")))
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        assert "epsilon" in state["log_history"][0] and len(seen) > 8
        found.append((names, parts, state, [*seen], flat(run.model)))
    same, other = found
    assert same[:4] == other[:4] and not torch.equal(same[4], other[4])


SAVING = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 3}


@pytest.mark.usefixtures("open_umask")
def test_a_checkpoint_of_the_trainer_can_be_published(trainer, tmp_path, capsys):
    """The key lies in a file of its own, which another run does not overwrite; diagnostics are raw, and left out."""
    for engine in (0, 1):
        run = trainer({"diagnostics": True}, engine=engine, **SAVING)
        run.train()
        assert "not_private_mean_loss" in run.private.history[0]
        key = check_the_key_lies_alone(tmp_path, run.private)
    assert len(list(tmp_path.glob("_hyfreedp-*"))) == 2
    state = torch.load(tmp_path / "checkpoint-3" / "optimizer.pt")
    run.create_model_card()
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert card.endswith(str(run.private.statement()).replace("# ", "## ")) and card.count("ifferentially private") == 1
    capsys.readouterr()
    main(["statement", str(tmp_path / "checkpoint-3" / "optimizer.pt"), "--json"])
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    assert state["key_file"] == key.name and not {"generator", "sampler"} & state.keys()
    assert "not_private" not in repr(state["history"])
    assert state["history"][2]["eta"] == run.private.history[2]["eta"]


def test_a_checkpoint_of_the_trainer_goes_on_bit_for_bit_with_the_key_of_its_run_alone(trainer, tmp_path):
    whole = trainer(**SAVING)
    whole.train()
    key = check_the_key_lies_alone(tmp_path, whole.private)
    with pytest.raises(ValueError, match="state_dict must have a 'key_file'"):
        whole.optimizer.load_state_dict(whole.private.state_dict())
    checkpoint, resumed = str(tmp_path / "checkpoint-3"), trainer(engine=99)  # the key comes from its file
    torch.manual_seed(99)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert torch.equal(flat(resumed.model), flat(whole.model))
    assert repr(resumed.private.history) == repr(whole.private.history)
    trainer(engine=1, output_dir=str(tmp_path / "other"), **SAVING).train()
    (other,) = (tmp_path / "other").glob("_hyfreedp-*")
    shutil.copy(other, key)
    with pytest.raises(ValueError, match="must hold the key of the run, but it is damaged"):
        trainer(engine=99).train(resume_from_checkpoint=checkpoint)
    key.unlink()
    with pytest.raises(FileNotFoundError, match=f"without the key of its noise: put the file {key.name}, .*{tmp_path}"):
        trainer(engine=99).train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize("stopped", [False, True])
def test_the_checkpoint_that_the_trainer_chooses_has_the_weights_that_it_evaluated(trainer, stopped):
    """The average so far; also where the run is stopped afterwards, with another average."""
    library = pytest.importorskip("transformers")
    choosing = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "greater_is_better": False}
    given = {"callbacks": [library.EarlyStoppingCallback(1)] if stopped else []}
    run = trainer({"target_epsilon": math.inf}, given=given, metric_for_best_model="loss", **choosing, **SAVING)
    run.train()
    assert (run.private.steps_left > 0) == stopped and run.state.best_global_step == 6
    assert run.evaluate()["eval_loss"] == pytest.approx(run.state.best_metric, rel=1e-5)


def test_the_trainer_uploads_no_key(trainer, tmp_path, monkeypatch):
    """Nor do the checkpoints that it uploads hold one."""
    library = pytest.importorskip("transformers.trainer")
    from huggingface_hub.utils import filter_repo_objects

    if not hasattr(library, "hf_api"):
        pytest.skip("as of transformers 5")
    sent, hub = [], mock.MagicMock()

    def upload(folder_path, ignore_patterns=None, **_):
        sent.extend(filter_repo_objects(os.listdir(folder_path), ignore_patterns=ignore_patterns))
        return mock.MagicMock(is_done=lambda: True)

    hub.create_repo.return_value.repo_id, hub.upload_folder.side_effect = "run", upload
    monkeypatch.setattr(library, "hf_api", lambda: hub)
    monkeypatch.setattr(library.Trainer, "create_model_card", lambda *_, **__: None)
    trainer(push_to_hub=True, hub_strategy="all_checkpoints", hub_token="none", **SAVING).train()
    assert "optimizer.pt" in sent and "training_args.bin" in sent
    assert list(tmp_path.glob("_hyfreedp-*.key")) and not any("hyfreedp" in name for name in sent)


def test_a_checkpoint_without_the_private_optimizer_is_not_gone_on_with(trainer, tmp_path):
    """Its steps would be counted as none."""
    trainer(save_strategy="steps", save_steps=3, save_only_model=True).train()
    with pytest.raises(RuntimeError, match=r"at step 3 and the private optimizer at step 0: .*optimizer"):
        trainer().train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


OTHER = {"train_sampling_strategy": "group_by_length", "debug": ["underflow_overflow"], "fsdp": "full_shard"}
OTHER |= {"dataloader_in_order": False, "max_grad_norm": 0.0, "lr_scheduler_type": "cosine", "data_seed": 0}
OTHER |= {"include_num_input_tokens_seen": "all"}


def test_arguments_that_would_change_nothing_are_refused(trainer, monkeypatch):
    """Each of them alone, and with it what to do; where the rate is fixed, its arguments are followed."""
    from hyfreedp.integrations.transformers import OF_A_FIXED_RATE, OF_THE_ENVIRONMENT, REFUSED, PrivateTrainer

    with pytest.raises(TypeError, match=r"privacy must be a dictionary of arguments .*, got float"):
        PrivateTrainer(privacy=3.0)
    plain = trainer()  # all of them as they are
    known = {field.name for field in dataclasses.fields(plain.args)}
    for name in known & {*REFUSED, *OF_A_FIXED_RATE}:
        old = getattr(plain.args, name)
        other = OTHER.get(name, not old if isinstance(old, bool) else (old or 1) * 2)
        arguments = {"model": plain.model, "args": plain.args}
        setattr(plain.args, name, other)
        with pytest.raises(ValueError, match=rf"{name} must be left (at .*|unset), got .*: \w+") as refusal:
            PrivateTrainer(privacy=PRIVACY, **arguments)
        if name in OF_A_FIXED_RATE:
            assert "'preset': 'fixed'" in str(refusal.value)
            PrivateTrainer(privacy=PRIVACY | {"preset": "fixed"}, **arguments)
        setattr(plain.args, name, old)
    with pytest.raises(ValueError, match="optimizers must have None for the scheduler: the learning rate is"):
        PrivateTrainer(privacy=PRIVACY, optimizers=(None, torch.optim.lr_scheduler.LRScheduler), **arguments)
    plain.args.report_to = ["codecarbon"]
    with pytest.raises(ValueError, match="report_to must not have 'codecarbon': the energy"):
        PrivateTrainer(privacy=PRIVACY, **arguments)
    for name in OF_THE_ENVIRONMENT:
        with monkeypatch.context() as environment, pytest.raises(ValueError, match=f"{name} must be unset, got 'all'"):
            environment.setenv(name, "all")
            trainer()


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

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1])

    def make(privacy=None, weights=None, engine=0, data=None, size=SIZE, kind=Module, **arguments):
        torch.manual_seed(3)
        module = kind()
        base = torch.optim.AdamW(module.parameters(), lr=0.1)
        data = DataLoader(data or make_data(), batch_size=size)
        settings = PRIVACY | {"steps": STEPS} | (privacy or {})
        loader = module.make_private(base, data, weights=weights, engine=PrivacyEngine(seed=engine), **settings)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        quiet |= {"enable_model_summary": False, "accelerator": "cpu", "default_root_dir": tmp_path, "max_epochs": 9}
        return module, loader, library.Trainer(**(quiet | arguments))

    make.kind = Module
    return make


@OF_LIGHTNING
@pytest.mark.parametrize(
    ("privacy", "weights"), [({}, None), (SEARCHING, lambda record: 1 / (1 + record[1]))], ids=["plain", "weighted"]
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
    assert copy.deepcopy(module).private is None  # as a callback copies it that averages weights
    assert trainer.callback_metrics.keys() == trainer.progress_bar_metrics.keys() == {"epsilon", "learning_rate"}
    assert math.isclose(float(trainer.callback_metrics["learning_rate"]), optimizer.history[-1]["eta"], rel_tol=1e-6)
    assert 2.9 < float(trainer.callback_metrics["epsilon"]) <= 3.0


@OF_LIGHTNING
def test_one_large_record_is_not_told_by_lightning(lightning, tmp_path):
    """All records in every batch, and one of them large, or not: whatever is not a noised sum must be the same."""
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    class Logging(lightning.kind):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("raw", loss)  # which is ignored
            return loss

    found = []
    for scale in (1.0, 1e3):
        folder, data = tmp_path / str(scale), make_data()
        data.tensors[0][0] *= scale
        watching = [ModelCheckpoint(folder, "run"), LearningRateMonitor("step"), EarlyStopping("epsilon", patience=99)]
        saving = {"logger": CSVLogger(folder, version=0), "callbacks": watching, "enable_checkpointing": True}
        saving |= {"default_root_dir": folder, "log_every_n_steps": 1, "max_epochs": STEPS}
        module, loader, trainer = lightning({"preset": "fixed"}, data=data, size=len(data), kind=Logging, **saving)
        trainer.fit(module, loader)
        saved = torch.load(folder / "run.ckpt", weights_only=False)
        assert saved["optimizer_states"][0]["ledger"]["steps"] == STEPS
        saved |= {"state_dict": None, "optimizer_states": [told(state) for state in saved["optimizer_states"]]}
        names = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*"))]
        logged = (folder / "lightning_logs" / "version_0" / "metrics.csv").read_text()
        assert "epsilon" in logged and "learning_rate" in logged
        metrics = trainer.callback_metrics | trainer.progress_bar_metrics | trainer.logged_metrics
        found.append((names, repr(saved).replace(str(folder), ""), logged, metrics, flat(module)))
    same, other = found
    assert same[:4] == other[:4] and not torch.equal(same[4], other[4])


@OF_LIGHTNING
@pytest.mark.usefixtures("open_umask")
def test_a_checkpoint_of_lightning_can_be_published(lightning, tmp_path, capsys):
    """The key lies in a file of its own; it is not resumed without it. The privacy statement is in it."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    callbacks = [ModelCheckpoint(tmp_path / "saved", "run", every_n_train_steps=5)]
    module, loader, trainer = lightning({"diagnostics": True}, enable_checkpointing=True, callbacks=callbacks)
    trainer.fit(module, loader)
    key = check_the_key_lies_alone(tmp_path, module.private)
    (state,) = torch.load(tmp_path / "saved" / "run.ckpt", weights_only=False)["optimizer_states"]
    assert state["key_file"] == key.name and "not_private" not in repr(state)
    capsys.readouterr()
    main(["statement", str(tmp_path / "saved" / "run.ckpt")])
    assert capsys.readouterr().out.startswith("# Differentially private: epsilon ")
    key.unlink()
    module, loader, trainer = lightning(engine=99)
    with pytest.raises(FileNotFoundError, match=f"put the file {key.name}, .* into the folder {tmp_path}"):
        trainer.fit(module, loader, ckpt_path=tmp_path / "saved" / "run.ckpt")


@OF_LIGHTNING
@pytest.mark.parametrize("argument", [{"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}], ids=str)
def test_arguments_for_which_lightning_would_advise_automatic_optimization_are_refused(lightning, argument):
    module, loader, trainer = lightning(**argument)
    with pytest.raises(ValueError, match=r"no gradient_clip_val, .* max_physical_batch_size= of make_private"):
        trainer.fit(module, loader)


@OF_LIGHTNING
@pytest.mark.parametrize("name", ["DeviceStatsMonitor", "Timer", "StochasticWeightAveraging"])
def test_callbacks_that_log_time_or_memory_or_change_weights_are_refused(lightning, name):
    kind = getattr(pytest.importorskip("lightning.pytorch.callbacks"), name)
    module, loader, trainer = lightning(callbacks=[kind(0.1) if "Weight" in name else kind()], logger=True)
    with pytest.raises(ValueError, match=f"callbacks must not have a {name}.* (not private|unseen by validation)"):
        trainer.fit(module, loader)


@OF_LIGHTNING
def test_an_early_end_of_lightning_is_told(lightning):
    module, loader, trainer = lightning(max_steps=2)
    with pytest.warns(UserWarning, match=f"fit ended {STEPS - 2} steps before the plan, .*module.private.averaged"):
        trainer.fit(module, loader)


def test_a_module_with_an_optimizer_of_its_own_is_refused():
    """Its steps would not be private."""
    lightning = pytest.importorskip("hyfreedp.integrations.lightning")
    own = type("Own", (lightning.PrivateModule,), {"configure_optimizers": lambda self: None})
    with pytest.raises(TypeError, match="must leave configure_optimizers out"):
        own().make_private(None, None)


def test_accelerate_does_not_wrap_what_is_private():
    """Its optimizer could not be stepped, and in several processes its loader would give each another step's batch."""
    accelerate = pytest.importorskip("accelerate")
    model = layers().double()
    wired = make_private(model, torch.optim.AdamW(model.parameters()), **PRIVACY)
    for given in (wired, wired[1:2], wired[2:]):
        with pytest.raises(TypeError, match=r"accelerator.prepare must not be given a private .*Leave out prepare"):
            accelerate.Accelerator(cpu=True).prepare(*given)
