"""What differs between devices: the CPU, and accelerators of any maker."""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

CPU = torch.device("cpu")


def backend(device: torch.device) -> ModuleType | None:
    """The torch module of an accelerator, such as ``torch.cuda``; None for the CPU."""
    return None if device.type == CPU.type else torch.get_device_module(device)


def rounds_products() -> bool:
    """Whether torch may round the factors of float32 matrix products to TF32 or bfloat16."""
    settings = {part.fp32_precision for part in _with_precision()}
    if settings:  # since PyTorch 2.9, where the older setting below may say something else
        return not settings <= {"none", "ieee"}
    return torch.get_float32_matmul_precision() != "highest"


@cache
def _with_precision() -> list[Any]:
    """The parts of torch.backends that compute products and have their own setting of precision."""
    parts = [getattr(torch.backends.mkldnn, "conv", None)]
    parts += [getattr(makers, "matmul", None) for makers in vars(torch.backends).values()]
    return [part for part in parts if getattr(part, "fp32_precision", None) is not None]


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """A context in which CUDA does not round float32 convolutions to TF32, as it does by default."""
    settings: Any = torch.backends.cudnn
    name, exact = "allow_tf32", False
    if hasattr(getattr(settings, "conv", None), "fp32_precision"):  # since PyTorch 2.9
        settings, name, exact = settings.conv, "fp32_precision", "ieee"  # type: ignore[assignment]
    before = getattr(settings, name)
    setattr(settings, name, exact)
    try:
        yield
    finally:
        setattr(settings, name, before)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@cache
def keep_freed_memory() -> bool:
    """Make this process keep the memory of freed CPU tensors, as torch does on accelerators; returns whether it does.

    By default glibc returns the memory of large tensors to the system and asks for it again, and a private step spends
    up to a third of its time on fresh pages. The price is fragmentation: free memory between tensors in use is kept.
    Nothing is changed if the environment configures the allocator (``MALLOC_*``, ``GLIBC_TUNABLES``), or without glibc.
    """
    configured = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if configured or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    return mallopt is not None and bool(mallopt(trim_threshold, -1) and mallopt(mmap_max, 0))


def hardware(device: torch.device) -> str:
    """The device's name, for records."""
    if (module := backend(device)) is not None:
        named = getattr(module, "get_device_name", None)
        return device.type if named is None else str(named(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return f"{(names or [platform.processor() or platform.machine()])[0]}, {os.cpu_count()} cores"


def kernels(device: torch.device) -> str:
    """What determines which kernels run, and so how they round: the accelerator's name or the CPU's instruction set."""
    return f"cpu {torch.backends.cpu.get_cpu_capability()}" if device.type == CPU.type else hardware(device)
