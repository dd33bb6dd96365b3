"""Whole private runs of the twins' small model on any device."""

import torch
from twins import BASES, cross_entropy, make_model, make_private, train

from hyfreedp import PrivacyEngine


def run(device, preset, tuning="full", base="adamw", *, steps=6, stop=None, **settings):
    """A private run on a device; its optimizer."""
    torch.manual_seed(0)
    model = make_model(tuning, dropout=0.1).to(device)
    settings = {"target_epsilon": 8.0, "preset": preset, "steps": steps} | settings
    _, optimizer, loader = make_private(model, BASES[base](model), **settings)
    go_on(optimizer, loader, device, stop)
    return optimizer


def resumed(device, preset, tuning="full", *, steps, stop, path):
    """The end of a run that was saved after some of its steps, and loaded into another model on the same device."""
    first = run(device, preset, tuning, steps=steps, stop=stop)
    PrivacyEngine().save_checkpoint(path=path, module=first.module, optimizer=first)
    torch.manual_seed(7)
    model = make_model(tuning, dropout=0.1, seed=0 if tuning == "lora" else 1).to(device)
    settings = {"target_epsilon": 8.0, "preset": preset, "steps": steps}
    model, second, loader = make_private(model, BASES["adamw"](model), **settings)
    PrivacyEngine().load_checkpoint(path=path, module=model, optimizer=second)
    go_on(second, loader, device)
    return second


def without_noise(device, **settings):
    """A run without privacy and without dropout, in float64; its optimizer."""
    model = make_model().to(device)
    _, optimizer, loader = make_private(model, BASES["adamw"](model), **settings)
    go_on(optimizer, loader, device)
    return optimizer


def go_on(optimizer, loader, device, stop=None):
    """The run to its end, or so far."""

    def loss(batch):
        return cross_entropy(optimizer.module)([tensor.to(device, non_blocking=True) for tensor in batch])

    train(optimizer, loader, loss, until=stop)
