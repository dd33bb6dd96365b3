"""The device on which experiments run."""

from __future__ import annotations

import torch

from hyfreedp.pytorch.devices import CPU


def default_device() -> torch.device:
    """The accelerator that PyTorch was built for (CUDA, ROCm, XPU or MPS), or the CPU if there is none."""
    return (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or CPU
