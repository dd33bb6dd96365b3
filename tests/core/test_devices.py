"""Devices: noise is drawn where its known answers come out. Steps on one: tests/gpu."""

import pytest
import torch
from twins import make_private

from hyfreedp.noise import cipher

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_device_without_the_known_answers_is_refused_before_any_data_is_used(monkeypatch):
    """As MPS, which has no float64. Noise that is asked for all the same is drawn on the CPU."""
    assert cipher.computes_noise(CPU) and not cipher.computes_noise(META)  # where nothing is computed
    assert cipher.noise_device(META) == cipher.noise_device(CPU) == CPU
    monkeypatch.setattr("hyfreedp.engine.computes_noise", lambda device: False)
    with pytest.raises(ValueError, match=r"'cpu' failed that test .*module.to\('cpu'\)"):
        make_private()


@pytest.mark.parametrize("error", [0, 1])
def test_noise_of_another_keystream_is_noticed(error, monkeypatch):
    right = cipher.chacha20
    answers = {
        "chacha20": lambda key, first, blocks, device: right(key, first, blocks, CPU) + error * (device == META),
        "secret_table": lambda key, device: None,
        "compress": lambda numbers, table: torch.zeros(1),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(cipher, name, answer)
    assert cipher.computes_noise.__wrapped__(META) == (error == 0)
