"""Devices: one place names them, and a whole private step minds them, seen on a simulated accelerator."""

import pytest
import torch
from models import bert, gpt2, groupnorm_convnet, llama_lora, tied_language_model, vit
from simulated import simulated
from training import resumed, run
from twins import BASES, flat, make_model, make_private

from hyfreedp import token_budget
from hyfreedp.gradients import AutomaticClipping, make_engine
from hyfreedp.noise import cipher
from hyfreedp.pytorch import devices

CPU = torch.device("cpu")


# -- which device ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_an_accelerator_is_found_whoever_made_it(kind):
    with simulated(kind) as machine:
        assert devices.default_device().type == devices.named_device("accelerator").type == kind
        assert devices.named_device(f"{kind}:0") == machine.device and devices.named_device("cpu") == CPU
        assert devices.hardware(machine.device) == devices.kernels(machine.device) == f"simulated {kind}"
        for name in ("tpu", f"{kind}:1", "mps"):
            with pytest.raises(ValueError, match=f"got '{name}': torch finds 1 of type '{kind}'"):
                devices.named_device(name)


def test_a_backend_without_float64_is_refused_before_any_data_is_used():
    """MPS. Noise that is asked for all the same is drawn on the CPU."""
    with simulated("mps") as machine:
        model = make_model().float().to(machine.device)
        with pytest.raises(ValueError, match=r"'mps' failed that test .*module.to\('cpu'\)"):
            make_private(model, BASES["adamw"](model))
        total = torch.zeros(3, device=machine.device)
        assert cipher.where(total) == CPU and cipher.where(torch.zeros(3)) == CPU
    assert cipher.computes_noise(CPU)


def test_noise_of_another_key_or_keystream_is_noticed(monkeypatch):
    with simulated() as machine:
        assert cipher.computes_noise(machine.device)
        cipher.computes_noise.cache_clear()
        right = cipher.chacha20
        wrong = lambda key, first, blocks, device: right(key, first, blocks, device) + (device != CPU)  # noqa: E731
        monkeypatch.setattr(cipher, "chacha20", wrong)
        assert not cipher.computes_noise(machine.device)


@pytest.mark.parametrize("build", [groupnorm_convnet, tied_language_model, vit, gpt2, bert, llama_lora])
def test_clipped_sums_are_those_of_the_cpu(build):
    torch.manual_seed(3)
    example = build()
    here = example.by_engine(make_engine(example.model, AutomaticClipping()))
    with simulated() as machine:
        example.model.to(machine.device)
        example.batch = tuple(tensor.to(machine.device) for tensor in example.batch)
        there = example.by_engine(make_engine(example.model, AutomaticClipping()))
        assert there[0].device == there[1].device == machine.device
    assert torch.equal(here[0], there[0].cpu()) and torch.equal(here[1], there[1].cpu())


# -- whole steps -------------------------------------------------------------------------------------------------------


RUNS = {
    "robust": {"preset": "robust", "steps": 3},
    "paper, biases": {"preset": "paper", "interval": 2, "steps": 3, "tuning": "biases", "base": "groups"},
    "fixed, lora": {"preset": "fixed", "tuning": "lora", "steps": 3},
    "paper, chosen pieces": {
        "preset": "paper",
        "max_physical_batch_size": token_budget(lambda record: record[0].shape[1], 15),
        "steps": 3,
    },
}


@pytest.mark.usefixtures("unbound_noise")
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_a_run_equals_that_on_the_cpu(settings):
    """Weights and records bit for bit."""
    here = run(CPU, **settings)
    with simulated() as machine:
        there = run(machine.device, **settings)
        assert all(parameter.device == machine.device for parameter in there.module.parameters())
    assert torch.equal(flat(here.module), flat(there.module))
    assert str(here.history) == str(there.history)


def test_a_run_goes_on_bit_for_bit(tmp_path):
    """By a file, in the middle: the accelerator's random state, from which dropout draws, is that of the saved run."""
    with simulated() as machine:
        whole = run(machine.device, "fixed", steps=3)
        second = resumed(machine.device, "fixed", steps=3, stop=2, path=tmp_path / "run")
        assert torch.equal(flat(whole.module), flat(second.module)) and str(whole.history) == str(second.history)
