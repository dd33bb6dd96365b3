"""The page for users of Opacus is true: both scripts run as written, and its names exist."""

import argparse
import os
import re
import subprocess
import sys

import pytest
import torch
from opacus.layers import DPLSTM
from pages import ROOT, programs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import Built, make_private, sgd

from hyfreedp import PrivacyEngine

*BLOCKS, MNIST = programs("docs/from-opacus.md")
SCRIPTS = dict(zip(("opacus", "hyfreedp"), BLOCKS, strict=True))
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.whole
@pytest.mark.parametrize("library", SCRIPTS)
def test_the_script_runs_as_written(library, tmp_path):
    """Each spends the budget that it asked for, learns, and leaves its checkpoint."""
    code = SCRIPTS[library]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"epsilon ([\d.]+), accuracy ([\d.]+) on others' records\n", done.stdout)[0]
    assert 2.9 <= float(told[0]) <= 3.0 and float(told[1]) > 0.6  # a third would be chance
    assert (tmp_path / "run.pt").stat().st_size > 0


def test_the_program_on_images_makes_two_whole_runs_on_one_loader(capsys):
    """Its functions, with a small net on random images: two runs on one loader, the whole budget each."""
    names = {"nn": nn, "PrivacyEngine": PrivacyEngine}
    exec(compile(MNIST, "mnist.py", "exec"), names)
    args = argparse.Namespace(delta=1e-4, epsilon=3.0, epochs=2, secure_rng=True)
    loader = DataLoader(TensorDataset(torch.randn(40, 1, 6, 6), torch.randint(10, (40,))), batch_size=8)
    for _ in range(2):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(36, 10))
        made = names["make_private"](args, model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for epoch in (1, 2):
            names["train"](args, made[0], torch.device("cpu"), made[2], made[1], epoch)
        assert made[1].steps_left == 0
    assert re.fullmatch(r"(epoch 1: epsilon [12]\.\d\d\nepoch 2: epsilon (2\.9\d|3\.00)\n){2}", capsys.readouterr().out)


def padded(records):
    x = nn.utils.rnn.pad_sequence([record[0] for record in records], batch_first=True)
    return x, torch.stack([record[1] for record in records])


@pytest.mark.parametrize("kind", [DPLSTM, nn.GRU])
def test_the_program_on_names_runs_with_layers_of_opacus_or_pytorch(kind):
    """Its loop, with recurrent layers of Opacus or PyTorch on names of many lengths, an empty batch among them."""
    data = [(torch.randint(20, (1 + i % 7,)), torch.tensor(i % 3)) for i in range(40)]
    parts = {"embedding": nn.Embedding(20, 6), "rnn": kind(6, 8, batch_first=True), "head": nn.Linear(8, 3)}
    model = Built(lambda m, x: m.head(m.rnn(m.embedding(x))[0][:, -1]), **parts)
    loader = DataLoader(data, batch_size=2, collate_fn=padded)
    budget = {"target_epsilon": 3.0, "target_delta": 1e-4, "epochs": 1}
    _, optimizer, loader = make_private(model, sgd(model, 2.0), loader=loader, seed=11, **budget)
    assert 0 in (len(loader.batch_sampler.batch(step)) for step in range(20))
    for batch in loader:
        optimizer.step(lambda record: nn.functional.cross_entropy(model(record[0]), record[1]), batch)
    assert optimizer.steps_left == 0 and optimizer.gradient_engine.fallback_reason is None
    assert 2.9 < optimizer.epsilon_spent(1e-4) <= 3.0
