"""Names of functions and classes, ``module:qualname``, and which of them peers may use.

A name leads from an imported module through classes to a function or class, without private parts,
and that must be defined in an allowed module: what a module merely imports cannot be reached
through it. So a peer with the job's secret can run the job's functions, but not ``os.system``. Of
torch, ``operator``, the builtins and this package only what is listed can be named
(``known_callables.py``, ``_OWN_NAMES``), unless the user allows more.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pibroch.errors import ConfigError, NotAllowedError
from pibroch.rpc.values.checks import Function, bounded
from pibroch.rpc.values.known_callables import known_callables, names_of_known

MAX_NAME_LENGTH = 512
MAX_CACHED = 4096
_MAX_RESULT_BYTES = 16 << 30

_MAIN = "__main__"
_SPAWNED_MAIN = "__mp_main__"
_OWN = "pibroch.rpc"
# names of this package that peers may use: what users call, and what its parts run on each other;
# no function that makes a worker leave
_OWN_NAMES = frozenset(
    f"{_OWN}.{name}"
    for name in str.split("""
    api:get_worker_info api:rpc_async api:rpc_sync
    autograd:backward autograd:current_context autograd:get_gradients autograd:live_counts
    functions:apply functions:async_execution info:WorkerInfo
    optim:DistributedOptimizer optim:LocalOptimizer optim:new_local_optimizer
    remote_module:RemoteModule remote_module:make_module remote_module:parameter_rrefs
    remote_module:run_forward remote_module:set_training rref:RRef rref:remote
    """)
)
_OWN_MODULES = frozenset(name.partition(":")[0] for name in _OWN_NAMES)
# names with one underscore are private in these packages
_LIBRARIES = ("torch", "numpy", "builtins", "operator", "_operator", "pibroch")
# packages of which only listed names may be used
_LISTED = ("torch", "builtins", "operator", "_operator")

_HOLDERS: dict[str, object] = {
    "torch:": torch,
    "torch:Tensor.": torch.Tensor,
    "torch.nn.functional:": torch.nn.functional,
}

# the namespace of a module, the first part of the name, its object, the object of the whole name
_Resolved = tuple[dict[str, Any], str, object, object]


def default_modules(caller: str) -> tuple[str, ...]:
    """The modules that peers may use by default: the caller's package, the main program, pibroch.

    Args:
        caller: ``__name__`` of the module that calls ``init_rpc``. A package of Python itself or
            torch (a launcher that calls on behalf of the user) does not count; nor does pibroch,
            whose parts allow what they serve.
    """
    package = caller.partition(".")[0]
    others = ("torch", "pibroch", _MAIN, _SPAWNED_MAIN)
    is_users = package not in sys.stdlib_module_names and package not in others
    return (_MAIN, _OWN, package) if is_users else (_MAIN, _OWN)


class Callables:
    """Gives callables names, and resolves the names that peers may use.

    Args:
        allowed: modules; all below them are allowed too. Also single names, ``module:qualname``, of
            functions and classes that are not listed.
        importable: those among the modules that are imported when a peer names them; the others
            must be imported already.
        max_result_bytes: of a listed function.
    """

    def __init__(
        self,
        allowed: Sequence[str],
        importable: Sequence[str] = (),
        max_result_bytes: int = _MAX_RESULT_BYTES,
    ) -> None:
        for module in (*allowed, *importable):
            if module in ("torch", "builtins", ""):
                raise ConfigError(
                    f"{module!r} among the allowed modules",
                    "modules whose every function a peer may run",
                    "allow single names, such as 'torch:ones'",
                )
        self._allowed = tuple(
            dict.fromkeys(_canonical(module) for module in allowed if ":" not in module)
        )
        self._importable = tuple(module for module in importable if ":" not in module)
        self._single = {name: _single(name) for name in allowed if ":" in name}
        self._single_names = {id(function): name for name, function in self._single.items()}
        for function in [*self._single.values()]:  # also where it was defined, as callers name it
            with contextlib.suppress(NotAllowedError):
                self._single.setdefault(_name(function), function)
        self._max_result_bytes = max_result_bytes
        self._bounded: dict[str, Function] = {}  # listed functions as peers call them
        self._names: dict[object, str] = {}
        self._resolved: dict[str, _Resolved] = {}

    def name(self, function: object) -> str:
        """``module:qualname`` of a function, class, or class or static method.

        Raises:
            NotAllowedError: when it has no name by which another process could find it.
        """
        try:
            return self._names[function]
        except (KeyError, TypeError):  # not named yet, or not hashable
            pass
        name = (
            self._single_names.get(id(function))
            or names_of_known().get(id(function))
            or _checked_name(function)
        )
        if len(self._names) >= MAX_CACHED:
            self._names.clear()
        self._names[function] = name
        return name

    def resolve(self, name: str) -> object:
        """The function or class of a name, as a value.

        Raises:
            NotAllowedError: when peers may not use the name here, or nothing has it.
        """
        cached = self._resolved.get(name)
        # only while the module still holds the same object: it may be reloaded, or be a notebook
        if cached is not None and cached[0].get(cached[1]) is cached[2]:
            return cached[3]
        value = self._single.get(name)
        if value is not None:
            return value
        value = known_callables().get(name)
        if value is not None:
            return value
        resolved = self._find(name)
        if len(self._resolved) >= MAX_CACHED:
            self._resolved.clear()
        self._resolved[name] = resolved
        return resolved[3]

    def to_call(self, name: str) -> Any:
        """The function or class of a name, in order to call it; a listed function with a bound.

        Raises:
            NotAllowedError: as ``resolve``.
        """
        function = self._bounded.get(name)
        if function is not None:
            return function
        value: Any = self.resolve(name)
        if isinstance(value, type) or name in self._single or name not in known_callables():
            return value
        return self._bounded.setdefault(name, bounded(value, self._max_result_bytes))

    def as_called(self, function: Function) -> Function:
        """A function that arrived as a value, in order to call it: with a bound, if listed."""
        name = names_of_known().get(id(function))
        return function if name is None else self.to_call(name)

    def opens(self, name: str) -> bool:
        """Whether this worker's user allowed this single name."""
        return name in self._single

    def allows(self, module: object) -> bool:
        """Whether a module (by its name) is allowed or lies below an allowed one."""
        if not isinstance(module, str):
            return False
        module = _canonical(module)
        if _below(module, (_OWN,)):
            return _OWN in self._allowed and module in _OWN_MODULES
        return _below(module, self._allowed)

    def _find(self, name: str) -> _Resolved:
        module_name, parts = _split(name)
        if not self.allows(module_name) or (_below(module_name, (_OWN,)) and not _is_own(name)):
            raise self._outside(name, module_name)
        names = _names_of(self._module(module_name, name), parts[0])
        for value in _path(names, parts):
            self._check_origin(name, value)
        return names, parts[0], names[parts[0]], value

    def _outside(self, name: str, module_name: str) -> NotAllowedError:
        if _below(module_name, _LISTED):
            return NotAllowedError(
                f"{name!r}",
                "of torch, operator and the builtins one of few functions, or an optimizer",
                "define a function of your own that calls it, or add this name to"
                " RpcBackendOptions.allowed_modules of this worker",
            )
        if _below(module_name, (_OWN,)):
            return NotAllowedError(
                f"{name!r}", "a function of pibroch.rpc that other workers may call"
            )
        return NotAllowedError(
            f"{name!r}, of a module that is not allowed here",
            "a module below " + ", ".join(self._allowed),
            "if peers may run all that is in it, add it to RpcBackendOptions.allowed_modules of"
            " this worker",
        )

    def _check_origin(self, name: str, value: object) -> None:
        if value is None or not callable(value):
            raise _missing(name)
        origin = _origin(value)
        is_own = isinstance(origin, str) and _below(origin, (_OWN,))
        if not self.allows(origin) or (
            is_own and not _is_own(f"{origin}:{getattr(value, '__qualname__', '')}")
        ):
            raise NotAllowedError(
                f"{name!r}, which is no function or class that was defined in an allowed module"
                f" (but in {origin!r})",
                "a module below " + ", ".join(self._allowed),
                "define a function of your own that calls it",
            )

    def _module(self, module_name: str, name: str) -> types.ModuleType:
        module = sys.modules.get(module_name)
        if module is not None and getattr(module.__spec__, "_initializing", False):
            module = importlib.import_module(module_name)  # waits for the thread that imports it
        if module is None and _below(module_name, self._importable):
            try:
                module = importlib.import_module(module_name)
            except ImportError as error:
                raise NotAllowedError(
                    f"{name!r}, whose module cannot be imported here ({error})"
                ) from error
        if module is None:
            raise NotAllowedError(
                f"{name!r}, of a module that is not imported here",
                "a module that this worker uses too",
                "import it here",
            )
        return module


def _name(function: object) -> str:
    if isinstance(function, functools.partial):
        raise NotAllowedError(
            f"{function!r} to be sent by name",
            "a function",
            "send the function of the partial, and its arguments as arguments",
        )
    if isinstance(function, torch.jit.ScriptFunction):
        # the Python function that was compiled
        function = getattr(function, "_torchdynamo_inline", function)
    owner = getattr(function, "__self__", None)
    if isinstance(function, types.MethodType) and not isinstance(owner, type):
        raise NotAllowedError(
            f"the bound method {getattr(function, '__qualname__', function)!r} to be sent by name",
            "a function, class or class method",
            "keep the object at its owner and call the method through an RRef, or send object and"
            " arguments to a function",
        )
    last = getattr(function, "__name__", None)
    if callable(function) and isinstance(last, str):
        # torch's functions in C do not know where they are
        for prefix, holder in _HOLDERS.items():
            if getattr(holder, last, None) is function:
                return f"{prefix}{last}"
    module = _defined_in(function)
    qualname = getattr(function, "__qualname__", None)
    if isinstance(function, types.MethodType) and isinstance(owner, type):
        module = owner.__module__
        qualname = f"{owner.__qualname__}.{function.__name__}"
    if not isinstance(module, str) or not isinstance(qualname, str) or not callable(function):
        raise NotAllowedError(
            f"{function!r} to be sent by name", "a function or class that is defined in a module"
        )
    return f"{_canonical(module)}:{qualname}"


def _checked_name(function: object) -> str:
    """The name of a function, if the name leads back to it."""
    name = _name(function)
    module_name, parts = _split(name)
    module = sys.modules.get(module_name)
    named = None
    if module is not None:
        *_, named = _path(_names_of(module, parts[0]), parts)
    if named is not function and not (isinstance(function, types.MethodType) and named == function):
        raise NotAllowedError(
            f"{name!r}, where its module has {'nothing' if named is None else 'something else'}",
            "a function or class that its module holds under its name",
            "define it at module level, and send it as it is after decoration",
        )
    return name


def _is_own(name: str) -> bool:
    """Whether ``name`` is listed of this package, or is a method of a listed class."""
    return name in _OWN_NAMES or name.rpartition(".")[0] in _OWN_NAMES


def _single(name: str) -> object:
    """The function or class that the user allowed by its name, of whatever module."""
    module, _, qualname = name.partition(":")
    try:
        value = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{name!r} among the allowed modules ({error})", "module:qualname of what is there"
        ) from error
    if not callable(value):
        raise ConfigError(f"{name!r} among the allowed modules", "a function or class")
    return value


def _split(name: str) -> tuple[str, list[str]]:
    """The module and the parts of a name, which is checked for its form."""
    if len(name) > MAX_NAME_LENGTH:
        raise NotAllowedError(
            f"{name[:MAX_NAME_LENGTH]!r} as a name", f"at most {MAX_NAME_LENGTH} letters"
        )
    module, colon, qualname = name.partition(":")
    parts = qualname.split(".")
    if "<" in qualname:
        raise NotAllowedError(
            f"{name!r}, which lives inside another function",
            "a function or class that its module holds under its name",
            "define it at module level with def or class",
        )
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *parts)):
        raise NotAllowedError(f"{name!r} as a name", "module:qualname")
    prefix = private_prefix(module)
    if any(part.startswith(prefix) for part in parts) or (
        module != _MAIN and ".__" in f".{module}"
    ):
        raise NotAllowedError(
            f"{name!r}, which is private",
            f"names that do not begin with {prefix!r}",
            "give it a public name",
        )
    return module, parts


def private_prefix(module: str) -> str:
    """The prefix of a module's private names: one underscore in libraries, two in users' code."""
    return "_" if _below(module, _LIBRARIES) else "__"


def _names_of(module: types.ModuleType, first: str) -> dict[str, object]:
    names = vars(module)
    if first not in names and module.__name__ == _MAIN and _SPAWNED_MAIN in sys.modules:
        return vars(sys.modules[_SPAWNED_MAIN])
    return names


def _path(names: dict[str, Any], parts: list[str]) -> Iterator[object]:
    """The object at each part of a qualified name; ``None`` where there is none.

    Only classes are searched, without running a descriptor or a metaclass.
    """
    value = names.get(parts[0])
    yield value
    for part in parts[1:]:
        owner = value
        value = None
        for base in owner.__mro__ if isinstance(owner, type) else ():
            if part in vars(base):
                value = vars(base)[part]
                break
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__get__(None, owner)
        yield value


def _origin(value: object) -> object:
    """The module in which a function or class was defined; ``None`` for other callable objects."""
    if isinstance(value, torch.jit.ScriptFunction):
        value = getattr(value, "_torchdynamo_inline", value)
    if isinstance(value, types.MethodType):
        value = value.__func__
    return _defined_in(value) if isinstance(getattr(value, "__qualname__", None), str) else None


def _defined_in(value: object) -> object:
    module = getattr(value, "__module__", None)
    return (
        module
        if module is not None
        else getattr(getattr(value, "__objclass__", None), "__module__", None)
    )


def _missing(name: str) -> NotAllowedError:
    return NotAllowedError(
        f"{name!r}, which is not there",
        "a function or class of that name",
        "let all workers run the same version of the code",
    )


def _canonical(module: str) -> str:
    """The module's name; in spawned children the main program has another one."""
    return _MAIN if module == _SPAWNED_MAIN else module


def _below(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
