"""Which methods of an object a peer may call through a remote reference.

A reference can point to anything that a callee returned, so ``getattr`` by a peer needs a rule: an
array can write itself to a file or read freed memory, a string's ``format`` reads any attribute.
Peers may call methods of objects whose class is in an allowed module; of tensors, modules of
``torch.nn``, optimizers and containers the methods that are listed, some of them with a check.
Numbers, strings and arrays are values: fetch them, or call a function with them. Private names
stay private.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable as AnyCallable
from typing import Any

import numpy as np
import torch

from pibroch.errors import NotAllowedError
from pibroch.rpc.values.callables import Callables, private_prefix
from pibroch.rpc.values.checked_containers import CONTAINERS
from pibroch.rpc.values.known_callables import known_callables, names_of_known

_SPECIAL = frozenset(
    str.split("""
    __abs__ __add__ __and__ __bool__ __call__ __contains__ __delitem__ __divmod__ __eq__ __float__
    __floordiv__ __ge__ __getitem__ __gt__ __iadd__ __int__ __invert__ __le__ __len__ __lshift__
    __lt__ __matmul__ __mod__ __mul__ __ne__ __neg__ __or__ __pos__ __pow__ __radd__ __repr__
    __rmul__ __rshift__ __rsub__ __rtruediv__ __setitem__ __str__ __sub__ __truediv__ __xor__
    """)
)
OF_MODULES = frozenset(
    str.split("""
    __call__ __contains__ __getitem__ __len__ __repr__ append bfloat16 buffers children cpu cuda
    double eval extend extra_repr float forward get get_buffer get_parameter get_submodule half
    insert items keys load_state_dict modules named_buffers named_children named_modules
    named_parameters parameters pop requires_grad_ reset_parameters state_dict to train update
    values zero_grad apply add_module clear
    """)
)
# no ``load_state_dict``: fused kernels would trust the shapes in it
_OF_OPTIMIZERS = frozenset(
    str.split("__repr__ add_param_group get_last_lr get_lr state_dict step zero_grad")
)
_VALUES = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    tuple,
    frozenset,
    range,
    np.ndarray,
    np.generic,
)
_TORCH = ("torch.nn.", "torch.optim.")
_Method = AnyCallable[..., Any]


def find_method(value: object, name: str, callables: Callables) -> _Method:
    """The method ``name`` of ``value``, for a peer.

    Raises:
        NotAllowedError: when peers may not call it.
        AttributeError: when there is none of that name.
    """
    if name.startswith("_") and name not in _SPECIAL and not _is_own(value, name, callables):
        raise _refused(
            value,
            name,
            "public methods, or with one underscore those of classes in allowed modules",
        )
    if not _has(value, name):
        raise AttributeError(f"{type(value).__qualname__!r} object has no attribute {name!r}")
    # no owner: an attribute of the object itself, or one that ``__getattr__`` makes
    base = _owner(value, name) or type(value)
    if isinstance(value, torch.Tensor) and _is_of_torch(base):
        return _method_of_tensor(value, name, callables)
    if base in CONTAINERS:
        return _method_of_container(value, CONTAINERS[base].get(name), name)
    if not _is_open(value, base, name, callables):
        raise _refused(
            value,
            name,
            "public methods of classes in allowed modules, of containers, tensors and torch.nn",
        )
    is_run = name in ("forward", "__call__") and _is_of_torch(base)
    if is_run and isinstance(value, torch.nn.EmbeddingBag):
        return functools.partial(_call_bag, value)
    return _bound(value, name, callables)


def _bound(value: object, name: str, callables: Callables) -> _Method:
    method = getattr(value, name)
    if not callable(method):
        raise TypeError(f"{type(value).__qualname__!r} object's {name!r} is not callable")
    bound_to = getattr(method, "__self__", None)
    if bound_to is value or bound_to is type(value):
        result: _Method = method
        return result
    listed_name = names_of_known().get(id(method))
    if listed_name is not None:
        checked: _Method = callables.to_call(listed_name)
        return checked
    if isinstance(method, (types.FunctionType, types.MethodType)) and callables.allows(
        method.__module__
    ):
        return method
    if isinstance(method, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)):
        raise _refused(value, name, "a method, or a function or object of an allowed module")
    return find_method(method, "__call__", callables)


def _has(value: object, name: str) -> bool:
    """Whether there may be an attribute of that name, without running code of the value's class."""
    # for example the submodules of a module
    is_dynamic = any("__getattr__" in vars(base) for base in type(value).__mro__)
    return is_dynamic or _owner(value, name) is not None or name in getattr(value, "__dict__", ())


def _owner(value: object, name: str) -> type | None:
    """The class among the value's bases that defines an attribute, ``None`` if none does."""
    return next((base for base in type(value).__mro__ if name in vars(base)), None)


def _is_own(value: object, name: str, callables: Callables) -> bool:
    """Whether a private name has one underscore and is of a user's class in an allowed module."""
    owner = _owner(value, name)
    if owner is None or name.startswith("__"):
        return False
    return callables.allows(owner.__module__) and private_prefix(owner.__module__) == "__"


def _method_of_container(value: object, checked: _Method | str | None, name: str) -> _Method:
    if checked is None:
        raise _refused(value, name, "a method that takes or gives single items, or all of them")
    return getattr(value, name) if isinstance(checked, str) else functools.partial(checked, value)


def _method_of_tensor(value: torch.Tensor, name: str, callables: Callables) -> _Method:
    listed_name = f"torch:Tensor.{name}"
    if callables.opens(listed_name):
        return _bound(value, name, callables)
    if listed_name in known_callables():
        return functools.partial(callables.to_call(listed_name), value)
    raise _refused(value, name, "one of few methods of tensors, or to_here()")


def _is_open(value: object, base: type, name: str, callables: Callables) -> bool:
    """Whether peers may call ``name`` of ``value``, which its class ``base`` defines."""
    if isinstance(value, (type, types.ModuleType, torch.jit.ScriptModule)):
        return False
    if any(base in owner.__mro__ for owner in _VALUES) and base is not object:
        return False
    if _is_of_torch(base) and isinstance(value, torch.nn.Module):
        return name in OF_MODULES or (base is type(value) and name not in vars(base))
    if _is_of_torch(base):
        return name in _OF_OPTIMIZERS and base.__module__.startswith(_TORCH)
    return callables.allows(type(value).__module__) or callables.opens(
        f"{base.__module__}:{base.__qualname__}.{name}"
    )


def _call_bag(
    bag: torch.nn.EmbeddingBag,
    ids: torch.Tensor,
    offsets: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a bag, if all ids and offsets are within their bounds: its kernel does not look."""
    if ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"got ids of type {ids.dtype}; need integers")
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < bag.num_embeddings):
        raise IndexError(f"got an id out of {bag.num_embeddings} embeddings")
    if offsets is not None and offsets.numel():
        wrong = (
            int(offsets.min()) < 0
            or int(offsets.max()) > ids.numel()
            or bool((offsets.diff() < 0).any())
        )
        if wrong or offsets.dim() != 1:
            raise IndexError(f"got offsets that do not lead through {ids.numel()} ids in order")
    result: torch.Tensor = bag(ids, offsets, weights)
    return result


def _is_of_torch(base: type) -> bool:
    return base.__module__ == "torch" or base.__module__.startswith("torch.")


def _refused(value: object, name: str, need: str) -> NotAllowedError:
    kind = type(value)
    return NotAllowedError(
        f"a call of {name!r} of an object of type {kind.__module__}.{kind.__qualname__} by a peer",
        need,
        "wrap it in a function or class of your own, or allow its module on the owner with"
        " RpcBackendOptions.allowed_modules",
    )
