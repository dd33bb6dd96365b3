"""Which device computes: the machine's accelerator, whoever made it, or the CPU. What differs by its kind is here."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

CPU = torch.device("cpu")
ACCELERATOR = "accelerator"  # its name in options: that of torch differs by maker


def default_device() -> torch.device:
    """The accelerator (CUDA, ROCm, XPU, MPS, as PyTorch was built for), or the CPU where there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return CPU if found is None else found


def named_device(name: str) -> torch.device:
    """The device of an option: "cpu", "accelerator", or as torch names one, such as "xpu:1".

    Raises:
        ValueError: no such device, or not on this machine.
    """
    here = default_device()
    try:
        device = here if name == ACCELERATOR else torch.device(name)
    except RuntimeError:
        device = None
    index = 0 if device is None or device.index is None else device.index
    if (
        device is None
        or device.type not in (CPU.type, here.type)
        or (name == ACCELERATOR and here == CPU)
        or (device.type != CPU.type and index >= torch.accelerator.device_count())
    ):
        found = "none" if here == CPU else f"{torch.accelerator.device_count()} of type {here.type!r}"
        raise ValueError(
            f"device must be 'cpu', {ACCELERATOR!r} or torch's name of one that is available, got {name!r}: torch "
            f"finds {found} on this machine"
        )
    return device


def backend(device: torch.device) -> ModuleType | None:
    """The module of torch for a kind of accelerator; None for the CPU."""
    return None if device.type == CPU.type else torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was told to."""
    if device.type != CPU.type:
        torch.accelerator.synchronize(device)


def random_states(device: torch.device) -> list[Tensor]:
    """torch's global random states, on the CPU: that of the CPU, then that of the accelerator ``device``, if it is."""
    module = backend(device)
    return [torch.get_rng_state(), *([] if module is None else [module.get_rng_state(device)])]


def set_random_states(device: torch.device, states: list[Tensor]) -> None:
    """Restore what :func:`random_states` gave; that of an accelerator where both, now and then, know one."""
    torch.set_rng_state(states[0].cpu())
    module = backend(device)
    if module is not None and len(states) > 1:
        module.set_rng_state(states[1].cpu(), device)


def hardware(device: torch.device) -> str:
    """The device's name, for records."""
    module = backend(device)
    if module is None:
        return _processor()
    named = getattr(module, "get_device_name", None)
    return device.type if named is None else str(named(device))


def kernels(device: torch.device) -> str:
    """What decides which kernels run, so that two processes round alike: the accelerator, or the CPU's instructions."""
    return f"cpu {torch.backends.cpu.get_cpu_capability()}" if device.type == CPU.type else hardware(device)


def _processor() -> str:
    cores = f"{os.cpu_count()} cores"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        if names:
            return f"{names[0]}, {cores}"
    return f"{platform.processor() or platform.machine()}, {cores}"
