"""A worker's name and id, and numbers that are unique over all workers."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from pibroch.errors import ConfigError

MAX_NAME_LENGTH = 127
_NAME = re.compile(r"[A-Za-z0-9_:-]+")


class WorkerNameError(ConfigError, RuntimeError):
    """A worker's name that cannot be used; a ``RuntimeError`` too, as in torch."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's name and id, as in ``torch.distributed.rpc``.

    Attributes:
        name: unique among the living workers.
        id: likewise; the rank given to ``init_rpc``.

    Raises:
        WorkerNameError: for a name that is empty, too long, or has other characters than letters,
            digits and ``_:-``.
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        check_name(self.name)


def check_name(name: str) -> None:
    """Raise WorkerNameError for a name that no worker can have."""
    if _NAME.fullmatch(name) and len(name) <= MAX_NAME_LENGTH:
        return
    if not name:
        need = "one: it must be non-empty"
    elif len(name) > MAX_NAME_LENGTH:
        need = f"one shorter than {MAX_NAME_LENGTH + 1} characters"
    else:
        need = (
            "letters, digits, underscores, colons and dashes: Worker name must match"
            f" {_NAME.pattern}"
        )
    raise WorkerNameError(f"worker name {name[:200]!r}", need, "choose another one")


def new_ids() -> Iterator[int]:
    """Integers below 2**63 that are unique over workers, incarnations and calls.

    A random start, then one by one. Any two of ten thousand sources with a million numbers each
    overlap with a probability below 1e-5.
    """
    return itertools.count(secrets.randbits(62))
