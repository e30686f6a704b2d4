"""Exceptions as data: what a callee raised is raised again at its caller.

The class is looked up if it is a builtin exception, one of torch's or pibroch's, or a class that
the caller lets its peers name. The exception is rebuilt from plain data, without its constructor if
possible, and only if its message comes out the same; otherwise the caller gets a ``RemoteError``.
The callee's traceback becomes the cause.
"""

from __future__ import annotations

import builtins
import copy
import functools
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from pibroch import errors
from pibroch.errors import NotAllowedError, ProtocolError, RemoteError
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.messages import encode

MAX_MESSAGE_LENGTH = 16 << 10
MAX_TRACEBACK_LENGTH = 64 << 10
MAX_ITEMS = 32


class Failure(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """An exception as data.

    Attributes:
        type: ``module:qualname`` of its class.
        message: ``str(error)``.
        arguments: its ``args``: plain data, ``{"repr": text}`` in place of anything else.
        state: its attributes, as far as they are plain data.
        traceback: as Python prints it.
    """

    type: str
    message: str
    arguments: list[Any] = []
    state: dict[str, Any] = {}
    traceback: str = ""


_decoder = msgspec.msgpack.Decoder(Failure)


class RemoteTraceback(Exception):
    """The callee's traceback, as the cause of the caller's exception."""

    def __init__(self, worker: WorkerInfo, text: str) -> None:
        super().__init__(worker, text)
        self.worker = worker
        self.text = text

    def __str__(self) -> str:
        return f"On worker {self.worker.name} (id {self.worker.id}):\n{self.text}"


class _Repr(str):
    """Text whose ``repr`` has no quotes.

    It takes the place of a key of another type in a ``KeyError``, whose message is thus unchanged.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def encode_failure(error: BaseException) -> bytes:
    """An exception as bytes; never raises."""
    return encode(failure_of(error))


def decode_failure(data: bytes, worker: WorkerInfo, callables: Callables) -> Exception:
    """The exception to raise at the caller; a ``ProtocolError`` when the bytes hold none."""
    try:
        return error_of(_decoder.decode(data), worker, callables)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return ProtocolError(
            f"a failure of worker {worker.name!r} that cannot be read ({error})",
            "as in the wire format",
        )


def failure_of(error: BaseException) -> Failure:
    """An exception as bounded data."""
    kind = type(error)
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    arguments = error.args
    if isinstance(error, OSError) and error.filename is not None and len(arguments) == 2:
        arguments = (*arguments, error.filename)
    state = {_text(name): _plain(item) for name, item in list(vars(error).items())[:MAX_ITEMS]}
    return Failure(
        f"{module}:{kind.__qualname__}"[:MAX_MESSAGE_LENGTH],
        _message(error),
        [_plain(argument) for argument in arguments[:MAX_ITEMS]],
        {name: item for name, item in state.items() if not _is_shown(item)},
        _text("".join(traceback.format_exception(error)).rstrip("\n"), MAX_TRACEBACK_LENGTH),
    )


def error_of(failure: Failure, worker: WorkerInfo, callables: Callables) -> Exception:
    """The exception to raise at the caller; its cause shows the callee's traceback.

    Args:
        failure: the exception as data.
        worker: the callee.
        callables: decides which classes may be built.
    """
    error = _rebuilt(failure, callables)
    if error is None:
        error = RemoteError(
            f"{failure.type.replace(':', '.')} on worker {worker.name!r}: {failure.message}",
            "an exception class that can be built here",
            "add its module to RpcBackendOptions.allowed_modules to catch it by its type",
        )
    error.__cause__ = RemoteTraceback(worker, failure.traceback)
    return error


def _rebuilt(failure: Failure, callables: Callables) -> Exception | None:
    cls = _known_errors().get(failure.type)
    if cls is None:
        try:
            named = callables.resolve(failure.type)
        except NotAllowedError:
            return None
        if not isinstance(named, type) or not issubclass(named, Exception):
            return None
        cls = named
    for build in _ways(cls, failure):
        try:
            error = build()
            if isinstance(error, cls) and str(error) == failure.message:
                return error
        except Exception:  # of a constructor or str() of the user's: the next way is tried
            continue
    return None


def _ways(cls: type[Exception], failure: Failure) -> Iterator[Callable[[], Exception]]:
    arguments = [_Repr(item["repr"]) if _is_shown(item) else item for item in failure.arguments]
    if cls.__module__ != "builtins":
        yield functools.partial(_without_constructor, cls, arguments, failure.state)
    yield functools.partial(cls, *arguments)
    yield functools.partial(cls, failure.message)


def _without_constructor(
    cls: type[Exception], arguments: Sequence[Any], state: Mapping[str, object]
) -> Exception:
    error = errors.without_constructor(cls, tuple(arguments))
    vars(error).update(state)
    return error


@functools.cache
def _known_errors() -> Mapping[str, type[Exception]]:
    """Classes of exceptions that may always be built, by ``module:qualname``."""
    of_torch = [
        vars(torch.linalg)["LinAlgError"],
        torch.OutOfMemoryError,
        *_errors_of(torch.distributed),
    ]
    classes = [*_errors_of(builtins), *_errors_of(errors), *of_torch]
    return types.MappingProxyType({f"{cls.__module__}:{cls.__qualname__}": cls for cls in classes})


def _errors_of(module: types.ModuleType) -> list[type[Exception]]:
    classes = [value for value in vars(module).values() if type(value) is type]
    return [cls for cls in classes if issubclass(cls, Exception)]


def _message(error: BaseException) -> str:
    try:
        return _text(str(error))
    except Exception as failure:
        return f"(no message: str() raised {type(failure).__name__})"


def _plain(value: object) -> object:
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return int(value)
    if isinstance(value, bytes) and len(value) <= MAX_MESSAGE_LENGTH:
        return bytes(value)
    try:
        return {"repr": _text(repr(value))}
    except Exception as failure:
        return {"repr": f"(repr() raised {type(failure).__name__})"}


def _is_shown(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("repr"), str)


def _text(text: str, limit: int = MAX_MESSAGE_LENGTH) -> str:
    """The text without lone surrogates; one longer than ``limit`` characters loses its middle."""
    if len(text) > limit:
        text = (
            f"{text[: limit // 2]} … {len(text) - limit:,} characters left out …"
            f" {text[-(limit // 2) :]}"
        )
    return text.encode("utf-8", "backslashreplace").decode()


def copy_of(error: Exception) -> Exception:
    """A copy of an error that is kept, in order to raise it.

    If the kept error itself were raised, its traceback would keep all frames that it went through.
    """
    try:
        copied = copy.copy(error)
    except Exception:  # of a constructor of the user's, which is not called below
        copied = error
    if type(copied) is not type(error) or copied is error or str(copied) != str(error):
        # its constructor has other parameters than ``args``
        copied = _without_constructor(type(error), error.args, vars(error))
    copied.__cause__ = error.__cause__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)
