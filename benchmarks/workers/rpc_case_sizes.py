"""How large the cases of topic ``rpc_cases`` are; ``RPC_CASES`` makes them larger."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

VARIABLE = "RPC_CASES"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What two cores can do in a second or less a step.

    Attributes:
        workers: processes beside the one that drives: observers, clients; stages; a parameter
            server and trainers.
        frames: that each observer sees in an episode, of 4 x 84 x 84 bytes.
        layers: of the transformer in each stage.
        width: of its hidden states.
        length: of its sequences.
        sequences: in a batch.
        parts: micro-batches.
        rows: of the table on the parameter server.
        dim: of its rows.
        samples: of each trainer in a step.
        parameters: of the federated model, about.
        local_steps: of each client in a round.
    """

    workers: int = 3
    frames: int = 20
    layers: int = 2
    width: int = 256
    length: int = 64
    sequences: int = 16
    parts: int = 4
    rows: int = 1_000_000
    dim: int = 64
    samples: int = 512
    parameters: int = 25_000_000
    local_steps: int = 2


QUICK = Sizes(
    frames=5,
    layers=1,
    width=64,
    length=32,
    sequences=8,
    rows=20_000,
    dim=16,
    samples=64,
    parameters=200_000,
)


def sizes(quick: bool) -> Sizes:
    """Of this run: ``RPC_CASES="workers=8,width=1024"`` changes those that it names.

    Raises:
        ValueError: for a name that is none, or a value that is no number.
    """
    chosen = QUICK if quick else Sizes()
    changes = {}
    for text in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, _, value = text.partition("=")
        if name not in {field.name for field in fields(Sizes)}:
            raise ValueError(f"{VARIABLE}: {name} is no size")
        changes[name] = int(value)
    return replace(chosen, **changes)


def as_text(chosen: Sizes) -> str:
    """For another process's variable.

    >>> as_text(Sizes()).split(",")[:2]
    ['workers=3', 'frames=20']
    """
    return ",".join(f"{field.name}={getattr(chosen, field.name)}" for field in fields(Sizes))
