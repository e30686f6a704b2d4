"""How many samples a call of a model is about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor, nn

from pibroch.errors import ConfigError

_DO = (
    "say it: data_parallel(model, num_samples=lambda batch: len(batch.labels)), called with the"
    " model's arguments"
)


def samples_of(*args: object, **kwargs: object) -> int:
    """The number of samples, of the first argument of a forward pass that has one.

    A tensor says its first dimension, a batch its ``batch_size`` or TorchRec's ``stride()``; any
    other object or container what all tensors and batches in it agree on.

    Raises:
        ConfigError: when no argument says anything, or parts of one do not agree.

    Example:
        >>> import torch
        >>> samples_of({"dense": torch.zeros(4, 3), "labels": torch.zeros(4)}, scale=torch.ones(2))
        4
    """
    for argument in (*args, *kwargs.values()):
        counts = sorted(set(_counts(argument, set())))
        if len(counts) > 1:
            raise ConfigError(
                f"a {type(argument).__name__} as a data-parallel model's argument, in which there"
                f" are {counts} samples",
                "one number",
                _DO,
            )
        if counts:
            return counts[0]
    raise ConfigError(
        "a data-parallel model called without a tensor",
        "samples along a tensor's first dimension",
        _DO,
    )


def _counts(thing: object, seen: set[int]) -> Iterator[int]:
    if isinstance(thing, Tensor):
        if thing.ndim:
            yield len(thing)
        return
    if isinstance(thing, nn.Module | type) or callable(thing) or id(thing) in seen:
        return
    seen.add(id(thing))
    count = getattr(thing, "batch_size", None)
    count = thing.stride() if count is None and callable(getattr(thing, "stride", None)) else count  # type: ignore[attr-defined]
    if isinstance(count, int):
        yield count
        return
    for part in _parts(thing):
        yield from _counts(part, seen)


def tensors_of(thing: object) -> Iterator[Tensor]:
    """The tensors in what a module returned: alone, in containers and in other objects."""
    yield from _tensors_of(thing, set())


def _tensors_of(thing: object, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif not (isinstance(thing, nn.Module | type) or callable(thing) or id(thing) in seen):
        seen.add(id(thing))
        for part in _parts(thing):
            yield from _tensors_of(part, seen)


def _parts(thing: object) -> Iterable[object]:
    if isinstance(thing, Mapping):
        return thing.values()
    if isinstance(thing, tuple | list):
        return thing
    if is_dataclass(thing):
        return [getattr(thing, each.name) for each in fields(thing)]
    return getattr(thing, "__dict__", {}).values()
