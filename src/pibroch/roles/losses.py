"""What a trainer says of a process that serves it and does not answer."""

from __future__ import annotations

from pibroch.errors import (
    RpcError,
    RpcTimeoutError,
    TrainingError,
    UnknownWorkerError,
    WorkerLostError,
)


def out_of_reach(role: str, name: str, error: RpcError) -> TrainingError:
    """The error to raise for that of a call.

    One that was lost may be there again when the run goes on.
    """
    lost = TrainingError(
        f"{role} {name!r} out of reach: {error.got}",
        "all processes of the run",
        "see its log; a training run goes on with --resume",
    )
    lost.is_loss = isinstance(error, (WorkerLostError, RpcTimeoutError, UnknownWorkerError))
    return lost
