"""The device on which experiments run."""

from __future__ import annotations

import torch

from hyfreedp.pytorch.devices import CPU


def default_device() -> torch.device:
    """The accelerator (CUDA, ROCm, XPU, MPS, as PyTorch was built for), or the CPU where there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return CPU if found is None else found


def named_device(name: str) -> torch.device:
    """The device named as in torch, or any "accelerator"; ValueError if there is none."""
    here = default_device()
    if name == CPU.type:
        return CPU
    if name == "accelerator" and here != CPU:
        return here
    if here == CPU or name.partition(":")[0] != here.type:
        raise ValueError(f"device must be one that is there, got {name!r}: torch finds {here.type!r} on this machine")
    return torch.device(name)
