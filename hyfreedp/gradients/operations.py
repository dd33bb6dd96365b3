"""What is known of torch's operations: which ask for a value, create a tensor, write, or cannot be mapped."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket


def _named(names: str, *of: Any) -> set[Any]:
    return {getattr(one, name) for one in of for name in names.split()}


def _attributes(names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names.split()}


_PLACES = _named("nonzero argwhere", Tensor, torch)  # their results depend only on where a tensor is zero
DECISIONS = _named("__bool__ item __int__ __float__ __index__ __complex__ tolist is_nonzero __contains__", Tensor)
DECISIONS |= _PLACES
FACTORIES = _named("zeros ones full empty tensor arange eye linspace zeros_like ones_like full_like empty_like", torch)
FACTORIES |= _named("new_zeros new_ones new_full new_empty new_tensor", Tensor)
# By function the place of its first size among its arguments; it asks a tensor there for its value.
SIZED = dict.fromkeys(_named("zeros ones empty arange", torch), 0)
SIZED |= dict.fromkeys(_named("new_zeros new_ones new_empty narrow view reshape expand", Tensor), 1)
METADATA = _attributes("shape dtype device ndim layout")
METADATA |= _named("size dim numel is_floating_point __len__", Tensor)
MEMORY_LAYOUT = _named("stride is_contiguous storage_offset", Tensor)
GRADIENT = _attributes("grad")
HAS_GRADIENT = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
REQUIRES_GRADIENT = {HAS_GRADIENT, Tensor.requires_grad.__set__, Tensor.requires_grad_}  # type: ignore[attr-defined]
ALIASES = _attributes("data") | _named("detach", Tensor, torch)  # they return aliases without a ``_base``
_IN_PLACE = _named("__setitem__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__", Tensor)
_IN_PLACE |= {Tensor.data.__set__}  # type: ignore[attr-defined]
_REACHES_MEMORY = _attributes("data _base")
_REACHES_MEMORY |= _named("numpy __array__ __dlpack__ untyped_storage __repr__ __format__ __reduce_ex__", Tensor)
_MISMAPPED = set(  # names of functions for which vmap computes wrong results
    "resize_ resize_as_ as_strided as_strided_ as_strided_copy set_ select_scatter linear_cross_entropy "
    "quantize_per_tensor quantize_per_tensor_dynamic quantize_per_channel _is_all_true _is_any_true squeeze_ "
    "embedding index_fill index_fill_ addbmm_ linalg_lstsq linalg_householder_product orgqr "
    "_pack_padded_sequence".split()  # the last one fails if values differ, so these would decide who is mapped
)
_TORCH_NAMESPACES = ("aten", "prims", "prim", "profiler")


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors among ``values``, and within lists, tuples and dictionaries."""
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list, dict)):
            tensors += tensors_in(*(value.values() if isinstance(value, dict) else value))
    return tensors


def asked(func: Any, input: Tensor, *arguments: Any, **named: Any) -> tuple[Any, Tensor, tuple[Any, ...], Any]:
    """The function, the tensor whose value it really asks for (of ``nonzero``: ``input != 0``), the other arguments."""
    if func is Tensor.__contains__:
        return Tensor.__bool__, (input == arguments[0]).any(), (), {}
    return func, input != 0 if func in _PLACES else input, arguments, named


def is_ordinary(func: Any) -> bool:
    """Whether an operation that nothing replaces only computes a result from its arguments; functorch can map it."""
    name = getattr(func, "__name__", "__get__")
    if func in FACTORIES or isinstance(func, OpOverload) or name in ("__get__", "apply"):
        return False
    return not _is_in_place(func) and _why_never_mappable(func) is None


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes into."""
    if isinstance(func, OpOverload):
        given = {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **kwargs}
        writes = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        return tensors_in(*map(given.get, writes))
    return tensors_in(*(args[:1] if _is_in_place(func) else ()), kwargs.get("out"))


@lru_cache
def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and func not in REQUIRES_GRADIENT
    return in_place or func in _IN_PLACE


def why_unmappable(func: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
    """Why an operation would show all samples to code that is not intercepted; None if it would not."""
    if calls_back(args, kwargs) or getattr(func, "__name__", "") == "custom_function_call":
        return f"{getattr(args[0], '__name__', func)}, whose own code would not be met"
    return _why_never_mappable(func)


def calls_back(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation is given a function to call. (The first test is quick, and mostly False.)"""
    values = (*args, *kwargs.values())
    return any(map(callable, values)) and any(callable(one) and not isinstance(one, type) for one in values)


@lru_cache
def _why_never_mappable(func: Any) -> str | None:
    name = getattr(func, "__name__", "")
    if isinstance(func, OpOverload | OpOverloadPacket) and str(func).split(".")[0] not in _TORCH_NAMESPACES:
        return f"{func}, an operation of another library"
    if name.split(".")[0] in _MISMAPPED and func is not torch.nn.functional.embedding:  # its rules see to it
        return f"{name}, which functorch maps wrongly"
    if name == "__set__" or func in _REACHES_MEMORY:
        return f"{getattr(getattr(func, '__self__', None), '__name__', name)} reaches a tensor's memory"
    return None
