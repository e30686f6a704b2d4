"""What peers may name of torch, ``operator`` and the builtins.

Lists, because their modules also hold ways to files and code.

Nothing here reaches a file, an import, an attribute by name, another process or memory that is not
its arguments'; a function among the arguments can itself only be one that may be named. What could
become large or slow is *checked*: a function that looks at its arguments first stands in its place
(``checks.py``, ``special_checks.py``, ``checked_builtins.py``). Which names of torch there are says
``known_names.py``.
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
from pibroch.rpc.values.checked_modules import made_small, optimizer_of, scheduler_of
from pibroch.rpc.values.checks import Function, broadcasting, in_parts, shaped, sized, windowed
from pibroch.rpc.values.result_sizes import SIZES

Known = tuple[str, object, Function]  # a name, what it is, and what runs when a peer calls it

_T = TypeVar("_T")
_building = threading.RLock()


def _once(build: Callable[[], _T]) -> Callable[[], _T]:
    """``build``, run once whatever threads ask first.

    ``functools.cache`` alone would let two threads build at a time and drop what one of them made;
    the numbers of dropped functions pass to new ones, and :func:`names_of_known` would give a
    user's function the name of a function of torch's.
    """
    kept = functools.cache(build)

    @functools.wraps(build)
    def ask() -> _T:
        with _building:
            return kept()

    return ask


@_once
def known_callables() -> Mapping[str, object]:
    """From ``module:qualname`` to the callable, for everything that may be named without being in an allowed module."""
    return types.MappingProxyType({name: known for name, known, _ in _all()})


@_once
def checked_callables() -> Mapping[str, Function]:
    """From the same names to what is called in their place."""
    return types.MappingProxyType({name: checked for name, _, checked in _all()})


@_once
def known_values() -> Mapping[str, object]:
    """From the same names to what arrives when a peer sends it as an argument.

    Classes, and functions whose results are merely as large as their operands allow, are themselves
    there: users' code may compare them. All others come with their checks, as users' code may call
    them with what the peer sent beside.
    """
    return types.MappingProxyType(
        {
            name: known if isinstance(known, type) or hasattr(checked, "is_lenient") else checked
            for name, known, checked in _all()
        }
    )


@_once
def names_of_known() -> Mapping[int, str]:
    """From ``id(callable)`` to its name, for both; they live as long as the process.

    The first of several names counts.
    """
    found: dict[int, str] = {}
    for callables in (known_callables(), checked_callables()):
        for name, known in callables.items():
            found.setdefault(id(known), name)
    return types.MappingProxyType(found)


def as_called(function: Function) -> Function:
    """A function or class that came as a value, with the checks that it is called with by name."""
    name = names_of_known().get(id(function))
    return function if name is None else checked_callables()[name]


@_once
def tensor_methods() -> Mapping[str, Function | None]:
    """Methods of tensors that a peer may call; ``None`` where nothing needs to be checked."""
    prefix = "torch:Tensor."
    return types.MappingProxyType(
        {
            name.removeprefix(prefix): None if checked is known else checked
            for name, known, checked in _all()
            if name.startswith(prefix)
        }
    )


@_once
def _all() -> tuple[Known, ...]:
    return (*_builtins(), *_functions(), *_methods(), *_modules(), *_classes())


def _builtins() -> Iterator[Known]:
    for module, known in (("builtins", builtin_functions()), ("operator", operators())):
        for name, function, checked in known:
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


def _functions() -> Iterator[Known]:
    for listed, check in _KINDS:
        for name in listed:
            for each in (name, f"{name}_"):
                function = getattr(torch, each, None)
                if function is not None and each not in special.FUNCTIONS:
                    yield f"torch:{each}", function, check(function)
    for name, checked in special.FUNCTIONS.items():
        yield f"torch:{name}", getattr(torch, name), checked


def _methods() -> Iterator[Known]:
    """Of tensors; a method in place has the size that its tensor has."""
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


def _modules() -> Iterator[Known]:
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


def _classes() -> Iterator[Known]:
    for name in names.MODULES:
        cls = getattr(torch.nn, name)
        yield f"torch.nn:{name}", cls, made_small(cls)
    yield "torch.nn:Parameter", torch.nn.Parameter, torch.nn.Parameter
    for name in names.OPTIMIZERS:
        cls = getattr(torch.optim, name)
        yield f"torch.optim:{name}", cls, optimizer_of(cls)
    for name in names.SCHEDULERS:
        cls = getattr(torch.optim.lr_scheduler, name)
        yield f"torch.optim.lr_scheduler:{name}", cls, scheduler_of(cls)
