"""An accelerator that is not there: it computes on the CPU, and is as strict as CUDA about what lies where.

Tensors stay plain tensors of the CPU, so that autograd, functorch and the optimizers work as ever and values are real.
What a tensor is said to lie on is noted by its storage; two modes see to it:

* a function mode answers ``.device``, moves tensors, makes them where ``device=`` says, and refuses ``.numpy()``;
* a dispatch mode sees every kernel. It refuses inputs on different devices (but for CPU tensors without dimensions and
  indices, as CUDA does) and generators of another device, and lets random kernels draw from the accelerator's own
  state. How often the host waits is counted on a real one, in tests/gpu.

What C++ makes within one operation, such as a mask in an attention, lies on "either": it goes with what it meets.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyfreedp.noise import cipher

CPU = torch.device("cpu")
EITHER = "either"
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")
_COPIES = ("aten::copy_", "aten::_foreach_copy_", "aten::set_")


class Machine:
    """The accelerator, and what has happened on it.

    Attributes:
        device: its device.
    """

    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind, 0)
        self._marks: dict[int, tuple[StorageWeakRef, Any]] = {}
        self._state = torch.Generator().manual_seed(1234).get_state()
        self._purge_at = 1000

    def mark_of(self, tensor: Tensor) -> Any:
        """The device, EITHER, or None for the CPU."""
        if torch._C._functorch.is_legacy_batchedtensor(tensor):  # of autograd.grad(is_grads_batched=True): no storage
            return EITHER
        entry = self._marks.get(_storage(tensor)._cdata)
        return None if entry is None or entry[0].expired() else entry[1]

    def mark(self, tensor: Tensor, mark: Any) -> None:
        if mark == self.device and self.device.type == "mps" and tensor.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        if torch._C._functorch.is_legacy_batchedtensor(tensor):
            return
        storage = _storage(tensor)
        if mark is None:
            self._marks.pop(storage._cdata, None)
            return
        # A weak reference keeps the address from being given to another storage.
        self._marks[storage._cdata] = (StorageWeakRef(storage), mark)
        if len(self._marks) > self._purge_at:
            self._marks = {key: entry for key, entry in self._marks.items() if not entry[0].expired()}
            self._purge_at = 2 * len(self._marks) + 1000

    def device_of(self, tensor: Tensor) -> torch.device:
        return self.device if self.mark_of(tensor) == self.device else CPU

    def target(self, device: Any) -> torch.device:
        """What a ``device=`` means; another accelerator is not on this machine."""
        named = torch.device(device) if not isinstance(device, int) else self.device
        if named.type == self.device.type:
            return self.device
        if named.type not in ("cpu", "meta"):
            raise RuntimeError(f"device {named} is not on this machine, which has {self.device}")
        return named

    @contextlib.contextmanager
    def random_state(self) -> Iterator[None]:
        """The accelerator's random state in place of the CPU's."""
        host = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(host)

    def check_generators(self, values: list[Any]) -> None:
        if any(isinstance(value, torch.Generator) for value in values):
            raise RuntimeError(f"Expected a {self.device.type!r} device type for generator but found 'cpu'")

    def module(self, device: Any = None) -> SimpleNamespace:
        """What ``torch.get_device_module`` gives for it."""

        def set_rng_state(state: Tensor, device: Any = None) -> None:
            assert self.mark_of(state) is None, "a random state is set from the CPU"
            self._state = state.clone()

        return SimpleNamespace(
            get_rng_state=lambda device=None: self._state.clone(),
            set_rng_state=set_rng_state,
            get_device_name=lambda device=None: f"simulated {self.device.type}",
            empty_cache=lambda: None,
        )


@contextlib.contextmanager
def simulated(kind: str = "cuda") -> Iterator[Machine]:
    """A machine with one accelerator of this kind, for the length of a ``with``."""
    machine = Machine(kind)
    seed, generator = torch.manual_seed, torch.Generator

    def manual_seed(number: int) -> torch.Generator:
        machine._state = torch.Generator().manual_seed(number).get_state()
        return seed(number)

    def seeded(device: Any = "cpu") -> Any:
        """A generator; one of the accelerator draws what the CPU does, so that runs on both can be compared."""
        if torch.device(device) == CPU:
            return generator()
        return SimpleNamespace(manual_seed=lambda number: SimpleNamespace(get_state=torch.get_rng_state))

    class Autocast(torch.autocast):
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            if device_type != kind:
                raise AssertionError(f"autocast of {device_type!r} says nothing to tensors on {kind!r}")
            super().__init__("cpu", *args, **kwargs)

    replaced = {
        "torch.accelerator.is_available": lambda: True,
        "torch.accelerator.current_accelerator": lambda check_available=False: torch.device(kind),
        "torch.accelerator.device_count": lambda: 1,
        "torch.accelerator.current_stream": lambda device=None: SimpleNamespace(is_capturing=lambda: False),
        "torch.accelerator.synchronize": lambda device=None: None,
        "torch.get_device_module": machine.module,
        "torch.manual_seed": manual_seed,
        "hyfreedp.noise.random_states.Generator": seeded,
        "torch.autocast": Autocast,
        "torch.amp.autocast": Autocast,
        "torch.amp.autocast_mode.autocast": Autocast,
        # The two modes are the machine, and no reason to compute samples one at a time.
        "hyfreedp.gradients.mapped.foreign_modes": lambda: False,
        "torch._C._len_torch_dispatch_stack": lambda: 0,
        # It would take the function mode away from the hooks that run in a backward pass.
        "torch.autograd.has_torch_function": lambda tensors: False,
    }
    cipher.computes_noise.cache_clear()
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(_Kernels(machine))
        stack.enter_context(_Functions(machine))
        try:
            yield machine
        finally:
            cipher.computes_noise.cache_clear()


class _Functions(TorchFunctionMode):
    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        machine, kwargs, name = self.machine, dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args)
        if func is Tensor.backward:
            with self:
                names = ("gradient", "retain_graph", "create_graph", "inputs")
                given = dict(zip(names, args[1:], strict=False)) | kwargs
                given["grad_tensors"] = given.pop("gradient", None)
                return torch.autograd.backward(args[0], **given)
        if name in ("to", "cpu", "cuda", "xpu") and isinstance(args[0], Tensor):
            return self._moved(name, *args, **kwargs)
        if name in ("numpy", "__array__") and machine.mark_of(args[0]) == machine.device:
            raise TypeError(f"can't convert {machine.device} device type tensor to numpy. Use Tensor.cpu() first")
        tensors = _tensors((args, kwargs))
        explicit = kwargs.get("device") is not None or not tensors or func is Tensor.new_tensor
        target = machine.device_of(tensors[0]) if tensors else CPU
        if kwargs.get("device") is not None:
            target = machine.target(kwargs["device"])
            if target == machine.device:
                kwargs["device"] = CPU
                machine.check_generators(list(kwargs.values()))
        own = machine.random_state() if explicit and target == machine.device else contextlib.nullcontext()
        with own:
            result = func(*args, **kwargs)
        if func is Tensor.__deepcopy__:  # copies the storage without a kernel
            machine.mark(result, machine.mark_of(args[0]))
        elif explicit:
            made = [tensor for tensor in _tensors(result) if tensor.device.type != "meta"]
            known = {_storage(tensor)._cdata for tensor in tensors}
            if any(_storage(tensor)._cdata in known for tensor in made):
                return self._moved("to", result, target)
            for tensor in made:
                machine.mark(tensor, None if target == CPU else target)
        return result

    def _attribute(self, func: Any, args: tuple) -> Any:
        name = func.__self__.__name__
        if name == "device":
            actual = func(*args)
            return actual if actual.type == "meta" else self.machine.device_of(args[0])
        if name in ("is_cpu", "is_cuda", "is_xpu", "is_mps"):
            return self.machine.device_of(args[0]).type == name.removeprefix("is_")
        return func(*args)

    def _moved(self, name: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        machine = self.machine
        source = target = machine.device_of(tensor)
        dtype, flags = kwargs.pop("dtype", None), []
        if name != "to":
            target = machine.target(name)
        for value in (*args, kwargs.pop("device", None), kwargs.pop("other", None)):
            if isinstance(value, Tensor):
                target, dtype = machine.device_of(value), value.dtype
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, bool):
                flags.append(value)
            elif value is not None:
                target = machine.target(value)
        kwargs |= dict(zip(("non_blocking", "copy"), flags, strict=False))
        kwargs.pop("non_blocking", None)
        kwargs["dtype"] = tensor.dtype if dtype is None else dtype
        if target.type == "meta" or target == source:
            return tensor.to(**kwargs, **({"device": target} if target.type == "meta" else {}))
        result = tensor.to(**(kwargs | {"copy": True}))
        machine.mark(result, None if target == CPU else target)
        return result


class _Kernels(TorchDispatchMode):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        machine, name = self.machine, func._schema.name
        leaves = tree_leaves((args, kwargs))
        inputs = [value for value in leaves if isinstance(value, Tensor)]
        marks = [machine.mark_of(tensor) for tensor in inputs]
        here = machine.device in marks
        if here:
            self._check(func, name, args, inputs, marks)
            machine.check_generators(leaves)
        random = torch.Tag.nondeterministic_seeded in func.tags
        with machine.random_state() if here and random else contextlib.nullcontext():
            result = func(*args, **kwargs)
        storages = {_storage(tensor)._cdata for tensor in inputs}
        mark = machine.device if here else None if None in marks else EITHER
        for made in _tensors(result):
            if _storage(made)._cdata not in storages:
                machine.mark(made, mark)
        return result

    def _check(self, func: Any, name: str, args: tuple, inputs: list[Tensor], marks: list[Any]) -> None:
        machine = self.machine
        on_host = [tensor for tensor, mark in zip(inputs, marks, strict=True) if mark is None]
        if name in _COPIES:
            return
        if name in _INDEXING:
            indices = [tensor for tensor in args[1] if tensor is not None]
            if machine.mark_of(args[0]) is None and any(machine.mark_of(i) == machine.device for i in indices):
                raise RuntimeError(f"indices should be on the device of the indexed tensor (cpu), in {name}")
            on_host = [tensor for tensor in on_host if all(tensor is not index for index in indices)]
        written = func._schema.arguments and func._schema.arguments[0].alias_info is not None
        written = written and func._schema.arguments[0].alias_info.is_write and isinstance(args[0], Tensor)
        if any(tensor.dim() for tensor in on_host) or (written and machine.mark_of(args[0]) is None):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {machine.device} and "
                f"cpu, in {name}"
            )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()
