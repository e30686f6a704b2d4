"""What peers may name of torch, ``operator`` and the builtins: lists, because their modules also hold ways to files and code.

Nothing here reaches a file, an import, an attribute by name or another process; a function among the arguments can itself
only be one that may be named. Left out on purpose: ``torch.load``, ``save``, ``from_file``, ``hub``, ``jit``, ``ops``,
``library``, ``compile``, ``utils``, ``classes``, ``package``; ``operator.attrgetter`` and ``methodcaller``; ``getattr``,
``eval``, ``open``, ``format`` and the like.
"""

from __future__ import annotations

import builtins
import functools
import operator
import types
from collections.abc import Iterable, Iterator, Mapping

import torch

_BUILTINS = str.split("""
    abs all any bool bytes complex dict divmod float frozenset int len list max min pow range repr round set sorted str
    sum tuple
""")
_OPERATORS = str.split("""
    abs add and_ concat contains countOf eq floordiv ge getitem gt index indexOf inv invert is_ is_not le lshift lt matmul mod
    mul ne neg not_ or_ pos pow rshift sub truediv truth xor
""")
# not functions of torch's table of operators, or classes
_TORCH_EXTRAS = ("Generator", "Size", "Tensor", "device", "manual_seed")
# a file; a raw buffer; kernels of single backends that take packed weights
_TORCH_CLOSED = ("from_file", "frombuffer", "sym_constrain_range", "sym_constrain_range_for_size")
_TORCH_CLOSED_PREFIXES = ("cudnn_", "fbgemm_", "miopen_", "mkldnn_", "quantized_")
# a file in /dev/shm; addresses; storages, which know files
_TENSOR_CLOSED = str.split("""
    const_data_ptr data_ptr module_load reinforce share_memory_ storage storage_type untyped_storage
""")
_TENSOR_OPERATORS = str.split("""
    __abs__ __add__ __and__ __contains__ __eq__ __floordiv__ __ge__ __getitem__ __gt__ __invert__ __le__ __len__ __lt__
    __matmul__ __mod__ __mul__ __ne__ __neg__ __or__ __pow__ __radd__ __rmul__ __rsub__ __rtruediv__ __setitem__ __sub__
    __truediv__ __xor__
""")


@functools.cache
def known_callables() -> Mapping[str, object]:
    """From ``module:qualname`` to the callable, for everything that may be named without being in an allowed module."""
    return types.MappingProxyType(dict(_all()))


@functools.cache
def names_of_known() -> Mapping[int, str]:
    """From ``id(callable)`` to its name; the callables live as long as the process. The first of several names counts."""
    names: dict[int, str] = {}
    for name, known in known_callables().items():
        names.setdefault(id(known), name)
    return types.MappingProxyType(names)


@functools.cache
def tensor_methods() -> frozenset[str]:
    """Methods of tensors that a peer may call."""
    public = (name for name in dir(torch.Tensor) if not name.startswith("_") and name not in _TENSOR_CLOSED)
    return frozenset(name for name in (*public, *_TENSOR_OPERATORS) if callable(getattr(torch.Tensor, name, None)))


def _all() -> Iterator[tuple[str, object]]:
    yield from (("builtins:" + name, getattr(builtins, name)) for name in _BUILTINS)
    yield from (("operator:" + name, getattr(operator, name)) for name in _OPERATORS)
    yield from _torch_functions()
    yield from _torch_classes()
    yield from (("torch:Tensor." + name, getattr(torch.Tensor, name)) for name in sorted(tensor_methods()))


def _torch_functions() -> Iterator[tuple[str, object]]:
    table = torch._C._VariableFunctions
    for name in [*dir(table), *torch.functional.__all__, *_TORCH_EXTRAS]:
        closed = name.startswith(("_", *_TORCH_CLOSED_PREFIXES)) or name in _TORCH_CLOSED
        if not closed and hasattr(torch, name):
            yield f"torch:{name}", getattr(torch, name)
    native = (torch._C._nn, torch._C._special, torch._C._linalg, torch._C._fft, table)  # type: ignore[attr-defined]
    for module in (torch.special, torch.linalg, torch.fft, torch.nn.functional, torch.nn.init):
        for name, value in _public(module):
            own = isinstance(value, types.FunctionType) and value.__module__ == module.__name__
            op = isinstance(value, types.BuiltinFunctionType) and (
                value.__self__ in native or value.__module__ == "torch"
            )
            if own or op:
                yield f"{module.__name__}:{name}", value


def _torch_classes() -> Iterator[tuple[str, object]]:
    schedulers = torch.optim.lr_scheduler
    yield from _subclasses(torch.nn, (torch.nn.Module, torch.nn.Parameter))
    yield from _subclasses(torch.optim, (torch.optim.Optimizer,))
    yield from _subclasses(schedulers, (schedulers.LRScheduler, schedulers.ReduceLROnPlateau))


def _subclasses(module: types.ModuleType, bases: tuple[type, ...]) -> Iterator[tuple[str, object]]:
    for name, value in _public(module):
        if (
            isinstance(value, type)
            and issubclass(value, bases)
            and f"{value.__module__}.".startswith(f"{module.__name__}.")
        ):
            yield f"{module.__name__}:{name}", value


def _public(module: types.ModuleType) -> Iterable[tuple[str, object]]:
    return [(name, value) for name, value in sorted(vars(module).items()) if not name.startswith("_")]
