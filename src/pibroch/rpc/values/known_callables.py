"""What peers may name of torch, ``operator`` and the builtins: an allowlist.

It is a list because these modules also hold ways to files and code. Nothing on it reaches a file,
an import, an attribute by name, another process, or memory other than that of its arguments; a
function among the arguments must itself be on the list. What could become large or slow is
*checked*: a function that looks at the arguments first takes its place (``checks.py``,
``special_checks.py``, ``checked_builtins.py``). The names of torch are in ``known_names.py``.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from pibroch.rpc.values import known_names as names
from pibroch.rpc.values import special_checks as special
from pibroch.rpc.values.checked_builtins import builtin_functions, operators
from pibroch.rpc.values.checked_modules import module_of, optimizer_of, scheduler_of
from pibroch.rpc.values.checks import Function, broadcasting, in_parts, shaped, sized, windowed
from pibroch.rpc.values.result_sizes import SIZES

Listed = tuple[str, object, Function]  # name, function or class, what runs when a peer calls it

_T = TypeVar("_T")
_building = threading.RLock()


def _once(build: Callable[[], _T]) -> Callable[[], _T]:
    """``build``, run once whichever threads call it first.

    ``functools.cache`` alone would let two threads build at a time and drop one result. The ``id``
    of a dropped function passes to a new one, and ``names_of_known`` would then give a user's
    function the name of one of torch's.
    """
    cached = functools.cache(build)

    @functools.wraps(build)
    def get() -> _T:
        with _building:
            return cached()

    return get


@_once
def known_callables() -> Mapping[str, object]:
    """From ``module:qualname`` to the callable, of all that is on the list."""
    return types.MappingProxyType({name: function for name, function, _ in _all()})


@_once
def checked_callables() -> Mapping[str, Function]:
    """From the same names to what runs in their place when a peer calls them."""
    return types.MappingProxyType({name: checked for name, _, checked in _all()})


@_once
def known_values() -> Mapping[str, object]:
    """From the same names to what arrives when a peer sends one as an argument.

    Classes, and functions whose results are only as large as their operands allow, arrive as
    themselves, as users' code may compare them. All others arrive with their checks, as users' code
    may call them with the peer's other arguments.
    """
    return types.MappingProxyType(
        {
            name: function
            if isinstance(function, type) or hasattr(checked, "is_lenient")
            else checked
            for name, function, checked in _all()
        }
    )


@_once
def names_of_known() -> Mapping[int, str]:
    """From ``id`` of a listed callable, or of its checked form, to its first name.

    These callables live as long as the process, so their ids are not used again.
    """
    names: dict[int, str] = {}
    for callables in (known_callables(), checked_callables()):
        for name, function in callables.items():
            names.setdefault(id(function), name)
    return types.MappingProxyType(names)


def as_called(function: Function) -> Function:
    """The checked form of a function or class that arrived as a value, if it is on the list."""
    name = names_of_known().get(id(function))
    return function if name is None else checked_callables()[name]


@_once
def tensor_methods() -> Mapping[str, Function | None]:
    """Methods of tensors that a peer may call, checked; ``None`` where no check is needed."""
    prefix = "torch:Tensor."
    return types.MappingProxyType(
        {
            name.removeprefix(prefix): None if checked is method else checked
            for name, method, checked in _all()
            if name.startswith(prefix)
        }
    )


@_once
def _all() -> tuple[Listed, ...]:
    return (*_builtins(), *_functions(), *_methods(), *_modules(), *_classes())


def _builtins() -> Iterator[Listed]:
    for module, functions in (("builtins", builtin_functions()), ("operator", operators())):
        for name, function, checked in functions:
            yield f"{module}:{name}", function, checked


def _plain(function: Function) -> Function:
    return function


def _spread(function: Function) -> Function:
    return broadcasting(function, SIZES.get(function.__name__))


def _sized(function: Function) -> Function:
    return sized(function, SIZES[function.__name__.removeprefix("fft_")])


_KINDS: tuple[tuple[Iterable[str], Any], ...] = (
    (names.PLAIN, _plain),
    (names.BROADCASTING, _spread),
    (names.SIZED, _sized),
    (names.WINDOWS, windowed),
    (names.SHAPED, shaped),
    (names.IN_PARTS, in_parts),
)


def _functions() -> Iterator[Listed]:
    for listed, check in _KINDS:
        for name in listed:
            for each in (name, f"{name}_"):
                function = getattr(torch, each, None)
                if function is not None and each not in special.FUNCTIONS:
                    yield f"torch:{each}", function, check(function)
    for name, checked in special.FUNCTIONS.items():
        yield f"torch:{name}", getattr(torch, name), checked


def _methods() -> Iterator[Listed]:
    """Methods of tensors; one in place needs no check, as its result has the tensor's size."""
    methods: dict[str, Function] = {}
    for listed, check in _KINDS:
        for name in listed:
            method = getattr(torch.Tensor, name, None)
            if callable(method):
                methods[name] = check(method)
            if callable(in_place := getattr(torch.Tensor, f"{name}_", None)):
                methods[f"{name}_"] = in_place
    for name in (*names.METHODS, *names.OPERATORS):
        if callable(method := getattr(torch.Tensor, name, None)):
            methods.setdefault(name, method)
    for name, checked in sorted((methods | special.METHODS).items()):
        yield f"torch:Tensor.{name}", getattr(torch.Tensor, name), checked


def _modules() -> Iterator[Listed]:
    functional = torch.nn.functional
    fft = torch.fft
    linalg = torch.linalg
    lists: list[tuple[types.ModuleType, Iterable[str], Any]] = [
        (functional, names.FUNCTIONAL, _plain),
        (functional, names.FUNCTIONAL_WINDOWS, windowed),
        (functional, names.FUNCTIONAL_BROADCASTING, _spread),
        (linalg, names.LINALG, _plain),
        (
            linalg,
            names.LINALG_BROADCASTING,
            lambda function: broadcasting(function, SIZES["matmul"]),
        ),
        (fft, names.FFT_PLAIN, _plain),
        (torch.special, names.SPECIAL, _plain),
        (torch.nn.init, names.INIT, _plain),
    ]
    for module, listed, check in lists:
        for name in listed:
            function = getattr(module, name)
            yield f"{module.__name__}:{name}", function, check(function)
    for module, listed in ((functional, names.FUNCTIONAL_SIZED), (fft, names.FFT)):
        for name in listed:
            yield (
                f"{module.__name__}:{name}",
                getattr(module, name),
                sized(getattr(module, name), SIZES[name]),
            )
    for name, checked in special.FUNCTIONAL.items():
        yield f"{functional.__name__}:{name}", getattr(functional, name), checked
    for name, checked in special.LINALG.items():
        yield f"{linalg.__name__}:{name}", getattr(linalg, name), checked


def _classes() -> Iterator[Listed]:
    for name in names.MODULES:
        cls = getattr(torch.nn, name)
        yield f"torch.nn:{name}", cls, module_of(cls)
    yield "torch.nn:Parameter", torch.nn.Parameter, torch.nn.Parameter
    for name in names.OPTIMIZERS:
        cls = getattr(torch.optim, name)
        yield f"torch.optim:{name}", cls, optimizer_of(cls)
    for name in names.SCHEDULERS:
        cls = getattr(torch.optim.lr_scheduler, name)
        yield f"torch.optim.lr_scheduler:{name}", cls, scheduler_of(cls)
