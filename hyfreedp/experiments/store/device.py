"""The device on which experiments run."""

from __future__ import annotations

import torch

from hyfreedp.pytorch.devices import CPU


def default_device() -> torch.device:
    """The accelerator (CUDA, ROCm, XPU, MPS, as PyTorch was built for), or the CPU where there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return CPU if found is None else found
