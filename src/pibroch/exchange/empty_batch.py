"""Users' own batches: which one a lookup is about, and copies without samples as fillers."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.errors import ConfigError

B = TypeVar("B")


class Filler(Generic[B]):
    """Makes fillers for a rank that has run out of batches, see :meth:`pibroch.Embeddings.feed`.

    Args:
        key: gives the ids of a batch.
        empty: makes of a batch one of its kind without samples.
    """

    def __init__(self, key: Callable[[B], Any] | None, empty: Callable[[B], B] | None) -> None:
        self._key = key
        self._empty = empty
        self._last: tuple[B, int] | None = None

    def follow(self, batch: B, prepared: JaggedBatch) -> None:
        """Remember the last batch, of which fillers are made."""
        self._last = batch, prepared.batch_size

    def make(self, filler: JaggedBatch) -> tuple[Any, Any]:
        """A filler of the user's kind, and its ids; ``filler`` is the exchange's own.

        Raises:
            ConfigError: when there never was a batch, or no empty one can be made of the last one,
                or was made by ``empty``.
        """
        if self._key is None and self._empty is None:
            return filler, filler
        if self._last is None:
            raise ConfigError(
                "a rank without any batch in feed(..., key=...), while others have some",
                "a batch on each rank, of which empty ones are made for the steps of others",
                "give each rank samples",
            )
        batch, num_samples = self._last
        made = without_samples(batch, num_samples) if self._empty is None else self._empty(batch)
        ids: Any = made if self._key is None else self._key(made)
        if (num_bags := ids.lengths().numel()) > 0:
            raise ConfigError(
                f"ids with {num_bags} lengths of a batch that empty= made",
                "none, as it has no samples",
                "leave samples out",
            )
        return made, ids


def is_same(one: Any, other: Any) -> bool:
    """Whether both are one object, or ragged ids over the same tensor objects.

    The latter are made by a copy to the device where the tensors are already.
    """
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, JaggedBatch) or not hasattr(one, "lengths"):
        return False
    names = ("values", "lengths", "weights_or_none")
    return list(one.keys()) == list(other.keys()) and all(
        _given(one, name) is _given(other, name) for name in names
    )


def _given(ragged: object, name: str) -> object:
    method = getattr(ragged, name, None)
    return None if method is None else method()


def without_samples(batch: object, num_samples: int) -> Any:
    """A copy of a batch without its samples.

    Tensors whose first dimension is the number of samples lose it; objects with ``values()`` and
    ``lengths()`` (ids and vectors as TorchRec has them) are made anew, of their own type, without
    values; tuples, lists, dictionaries, dataclasses and other objects with attributes are copied
    with their parts so treated. All else stays as it is.

    Args:
        batch: is not changed.
        num_samples: it has.

    Raises:
        ConfigError: for ragged ids of a type that cannot be made from keys, values and lengths.

    Example:
        >>> without_samples({"dense": torch.ones(2, 3), "scale": torch.ones(5), "name": "a"}, 2)
        {'dense': tensor([], size=(0, 3)), 'scale': tensor([1., 1., 1., 1., 1.]), 'name': 'a'}
    """
    if isinstance(batch, Tensor):
        return batch[:0] if batch.ndim and len(batch) == num_samples else batch
    if all(callable(getattr(batch, name, None)) for name in ("values", "lengths")):
        return _without_values(batch)
    if isinstance(batch, dict):
        parts = {name: without_samples(part, num_samples) for name, part in batch.items()}
        made = copy(batch)
        made.update(parts)
        return made
    if isinstance(batch, tuple | list):
        shorter = [without_samples(part, num_samples) for part in batch]
        return type(batch)(*shorter) if hasattr(batch, "_fields") else type(batch)(shorter)
    return _with_parts(batch, num_samples)


def _without_values(ragged: Any) -> Any:
    values = ragged.values()[:0]
    lengths = ragged.lengths()[:0]
    weights = getattr(ragged, "weights_or_none", lambda: None)()
    named = {"values": values, "lengths": lengths} | (
        {} if weights is None else {"weights": weights[:0]}
    )
    if callable(getattr(ragged, "keys", None)):
        named["keys"] = ragged.keys()
    try:
        return type(ragged)(**named)
    except TypeError as error:
        raise ConfigError(
            f"a {type(ragged).__name__} on a rank that has run out of batches",
            "one without samples, for the steps of others",
            "pass feed(..., empty=FUNCTION), which makes one of a batch",
        ) from error


def _with_parts(batch: object, num_samples: int) -> Any:
    names = (
        [each.name for each in fields(batch)]
        if is_dataclass(batch)
        else list(getattr(batch, "__dict__", ()))
    )
    if not names or isinstance(batch, type | torch.nn.Module):
        return batch
    made = copy(batch)
    for name in names:
        shorter = without_samples(getattr(batch, name), num_samples)
        object.__setattr__(made, name, shorter)  # also of frozen dataclasses
    return made
