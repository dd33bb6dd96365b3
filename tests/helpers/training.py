"""Whole private runs of the twins' small model on any device."""

from collections import Counter

import torch
from twins import BASES, cross_entropy, make_data, make_model, make_private


def run(device, preset, tuning="full", base="adamw", *, steps=6, machine=None, stop=None, **settings):
    """A private run on a device; its optimizer, and the waits of each step."""
    torch.manual_seed(0)
    model = make_model(tuning, dropout=0.1).to(device)
    settings = {"target_epsilon": 8.0, "accountant": "rdp"} | settings  # quick: a PLD of so little noise takes seconds
    model, optimizer, loader = make_private(
        model, BASES[base](model), make_data(), preset=preset, steps=steps, **settings
    )
    return optimizer, go_on(optimizer, loader, device, machine, stop)


def go_on(optimizer, loader, device, machine=None, stop=None):
    def per_sample_loss(batch):
        return cross_entropy(optimizer.module)([tensor.to(device, non_blocking=True) for tensor in batch])

    waits = []
    while optimizer.ledger.steps < (stop or optimizer.split.steps):
        for batch in loader:
            if machine:
                machine.waits.clear()
            record = optimizer.step(per_sample_loss, batch)
            waits.append((record, Counter(machine.waits) if machine else None))
            if optimizer.ledger.steps == (stop or optimizer.split.steps):
                break
    return waits
