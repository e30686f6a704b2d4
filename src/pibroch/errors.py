"""The exception tree. Every message says what was got, what is needed and what to do.

PibrochError
├── InputError            wrong usage or wrong input: the command line exits with 2
│   ├── ConfigError       a recipe, an option or an argument
│   ├── DataError         raw data, an encoded dataset or a batch
│   │   └── RowIdError    an id outside its table (names feature, sample and id)
│   └── CheckpointError   missing, damaged, or of another schema
│       └── DamagedCheckpointError  its files are missing, cut short, changed or unreadable
├── TrainingError         a run that cannot go on: the command line exits with 1
│   ├── NonFiniteLossError
│   ├── NonFiniteGradientError  of a loss that is finite (names step, feature and sample)
│   └── RankFailedError   another rank failed or was lost (names rank and step)
├── RpcError              a remote call that did not come to its end
│   ├── RpcTimeoutError   no answer in time
│   ├── UnknownWorkerError  nobody of that name or id has joined
│   ├── WorkerLostError   the other worker ended or cannot be reached (names it)
│   ├── AuthenticationError  it does not know the job's secret, or speaks another version
│   ├── NotAllowedError   a function or type outside the allowed modules, or not sent by name
│   ├── ProtocolError     bytes that break the wire format or its limits
│   ├── ReferenceLostError  a remote reference whose value is gone
│   └── RemoteError       the callee raised an error whose type the caller cannot build
├── StorageError          the disk refused to take what had to be written
└── MissingDependencyError  an optional extra that is not installed
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)


class PibrochError(Exception):
    """Base of all errors that pibroch raises on purpose.

    Args:
        got: what was found, with the place where it was found.
        need: what would have been right.
        do: what the user can do about it.

    Attributes:
        is_loss: whether a process was lost, by no fault of its own as far as is known: started
            again, the same run may go on.
    """

    exit_code = 1
    is_loss = False

    def __init__(self, got: str, need: str = "", do: str = "") -> None:
        self.got = got
        self.need = need
        self.do = do
        parts = [f"got {got}"]
        parts += [f"need {need}"] if need else []
        parts += [f"do: {do}"] if do else []
        super().__init__("; ".join(parts))

    def __reduce__(self) -> tuple[Any, ...]:
        # not by the constructor, which would take the whole message for `got`
        return without_constructor, (type(self), self.args), vars(self)


def without_constructor(cls: type[E], args: tuple[object, ...]) -> E:
    """An exception with these ``args``, of a class whose constructor may take others."""
    # the first ``__new__`` may not fit: a subclass of RuntimeError and OSError has OSError's layout
    bases: tuple[Any, ...] = cls.__mro__
    for base in bases:
        with suppress(TypeError):
            error: E = base.__new__(cls, *args)
            error.args = args  # not set yet by an OSError with a constructor of its own
            return error
    raise TypeError(f"no __new__ of {cls} takes {args}")


class InputError(PibrochError):
    """Wrong usage or wrong input; nothing was changed."""

    exit_code = 2


class ConfigError(InputError):
    """A recipe, an option or an argument that cannot be used."""


class DataError(InputError):
    """Raw data, an encoded dataset or a batch that cannot be used."""


class RowIdError(DataError):
    """An id outside its table."""


class CheckpointError(InputError):
    """A checkpoint that is missing, damaged, or of another schema."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are not those that were saved.

    Another one of the run may be whole.
    """


class TrainingError(PibrochError):
    """A run that cannot go on."""


class NonFiniteLossError(TrainingError):
    """The loss became NaN or infinite."""


class NonFiniteGradientError(TrainingError):
    """Gradients of embeddings became NaN or infinite; no row of this process has moved by them."""


class RankFailedError(TrainingError):
    """Another rank failed or was lost.

    Args:
        rank: which one.
        step: the step that it was in, ``None`` before the first.
        reason: what is known of the cause.
    """

    def __init__(self, rank: int, step: int | None, reason: str) -> None:
        self.rank = rank
        self.step = step
        where = "before the first step" if step is None else f"in step {step}"
        super().__init__(
            f"rank {rank} failed {where}: {reason}",
            "all ranks",
            "see that rank's log; a training run goes on with --resume",
        )


class RpcError(PibrochError, RuntimeError):
    """A remote call that did not come to its end.

    A ``RuntimeError`` too, as in ``torch.distributed.rpc``.
    """


class RpcTimeoutError(RpcError, TimeoutError):
    """No answer in time; the callee may still be at work."""


class UnknownWorkerError(RpcError, ValueError):
    """Nobody of that name or id has joined."""


class WorkerLostError(RpcError, ConnectionError):
    """The other worker ended, was lost, or cannot be reached.

    Args:
        worker: its name.
        reason: what is known of the cause.
    """

    def __init__(self, worker: str, reason: str) -> None:
        self.worker = worker
        self.reason = reason
        super().__init__(
            f"worker {worker!r} lost: {reason}",
            "a running worker of that name",
            "see its log; calls reach it again once it came back under its name",
        )


class AuthenticationError(RpcError):
    """The other side does not know the job's secret, or speaks another version."""


class NotAllowedError(RpcError):
    """A function or type outside the allowed modules, or one that cannot be named."""


class ProtocolError(RpcError):
    """Bytes that break the wire format or its limits."""


class ReferenceLostError(RpcError):
    """A remote reference whose value is gone."""


class RemoteError(RpcError):
    """The callee raised an error whose type cannot be built here."""


class StorageError(PibrochError):
    """The disk refused to take what had to be written; what was there before is still whole."""

    exit_code = 2


class MissingDependencyError(PibrochError):
    """An optional extra that is not installed."""
