"""Which methods of an object a peer may call through a remote reference.

A reference can point to anything that a callee returned, so ``getattr`` by a peer needs a rule: an array could be told to
write itself to a file, a string's ``format`` reads any attribute. The object's class must lie in an allowed module, or
be a container, number, string, array, tensor, module of ``torch.nn`` or optimizer; private names stay private.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable as AnyCallable
from typing import Any

import numpy as np
import torch

from pibroch.errors import NotAllowedError
from pibroch.rpc.callables import Callables, private_prefix
from pibroch.rpc.known_callables import names_of_known, tensor_methods

_DATA: tuple[type, ...] = (
    *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, str, tuple),
    *(collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque),
    np.ndarray,
    torch.Size,
)
_TORCH = ("torch.nn.", "torch.optim.")
_SPECIAL = frozenset(
    str.split("""
    __abs__ __add__ __and__ __bool__ __call__ __contains__ __delitem__ __divmod__ __eq__ __float__ __floordiv__ __ge__
    __getitem__ __gt__ __iadd__ __int__ __invert__ __le__ __len__ __lshift__ __lt__ __matmul__ __mod__ __mul__ __ne__
    __neg__ __or__ __pos__ __pow__ __radd__ __repr__ __rmul__ __rshift__ __rsub__ __rtruediv__ __setitem__ __str__
    __sub__ __truediv__ __xor__
    """)
)
_CLOSED: dict[type, tuple[str, ...]] = {
    str: ("format", "format_map"),
    np.ndarray: ("dump", "dumps", "tofile"),
    torch.nn.Module: ("compile", "share_memory"),
}


def find_method(value: object, name: str, callables: Callables) -> AnyCallable[..., Any]:
    """The method ``name`` of ``value``, for a peer.

    Raises:
        NotAllowedError: when peers may not call it.
        AttributeError: when there is none of that name.
    """
    if name.startswith("_") and name not in _SPECIAL and not _is_own(value, name, callables):
        raise _refused(value, name, "public methods, or with one underscore those of classes in allowed modules")
    if not _has(value, name):
        raise AttributeError(f"{type(value).__qualname__!r} object has no attribute {name!r}")
    closed = any(isinstance(value, base) and name in names for base, names in _CLOSED.items())
    if closed or not _is_open(value, name, callables):
        raise _refused(value, name, "public methods of classes in allowed modules, of containers, tensors and torch.nn")
    method = getattr(value, name)
    if not callable(method):
        raise TypeError(f"{type(value).__qualname__!r} object's {name!r} is not callable")
    bound_to = getattr(method, "__self__", None)
    if bound_to is not value and bound_to is not type(value) and not _may_be_called(method, callables):
        raise _refused(value, name, "a method, or a function or object of an allowed module")
    result: AnyCallable[..., Any] = method
    return result


def _has(value: object, name: str) -> bool:
    """Whether there may be an attribute of that name; runs no code of the value's."""
    classes = type(value).__mro__
    made = any("__getattr__" in vars(base) for base in classes)  # such as the submodules of a module
    return made or any(name in vars(base) for base in classes) or name in getattr(value, "__dict__", ())


def _is_own(value: object, name: str, callables: Callables) -> bool:
    """Whether a private name is one of the user's own: with one underscore, and of a class in an allowed module."""
    if name.startswith("__"):
        return False
    owner = next((base for base in type(value).__mro__ if name in vars(base)), None)
    return owner is not None and callables.allows(owner.__module__) and private_prefix(owner.__module__) == "__"


def _is_open(value: object, name: str, callables: Callables) -> bool:
    kind = type(value)
    if isinstance(value, (type, types.ModuleType, torch.jit.ScriptModule)):
        return False
    if isinstance(value, torch.Tensor) and kind.__module__.startswith("torch"):
        return name in tensor_methods()
    return kind in _DATA or kind.__module__.startswith(_TORCH) or callables.allows(kind.__module__)


def _may_be_called(method: object, callables: Callables) -> bool:
    """Whether something callable that lies in an attribute may be called: it is a known function, or of an open class."""
    if isinstance(method, (types.FunctionType, types.MethodType)):
        return callables.allows(method.__module__) or str(method.__module__).startswith(_TORCH)
    if id(method) in names_of_known():
        return True
    return not isinstance(method, types.BuiltinFunctionType) and _is_open(method, "__call__", callables)


def _refused(value: object, name: str, need: str) -> NotAllowedError:
    kind = type(value)
    return NotAllowedError(
        f"a call of {name!r} of an object of type {kind.__module__}.{kind.__qualname__} by a peer",
        need,
        "wrap it in a function or class of your own, or allow its module on the owner with RpcBackendOptions.allowed_modules",
    )
