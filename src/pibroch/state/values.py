"""Nested plain values with tensors in them, as JSON beside a file of tensors.

How a program's states are kept without pickle.

What JSON has no word for is an object with one key that begins with ``$``: ``{"$tensor":
"0.weight/exp_avg"}``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pibroch.errors import ConfigError
from pibroch.state.files import CHECKPOINT

_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_KINDS = (
    "None, bool, int, float, str, dense tensors, and dicts, lists, tuples and Counters of these"
)


def encode(value: object, path: str, tensors: dict[str, Tensor]) -> object:
    """A value as JSON takes it; its tensors go into ``tensors``, each under its path.

    Args:
        value: nested dicts, lists, tuples, numbers, texts and tensors.
        path: of the value, for errors and names.
        tensors: is written to.

    Raises:
        ConfigError: for anything else, e.g. a function; names where it is.

    Example:
        >>> tensors = {}
        >>> encode({"lr": (0.1, float("inf")), "moment": torch.ones(2)}, "sgd", tensors)
        {'lr': {'$tuple': [0.1, {'$float': 'inf'}]}, 'moment': {'$tensor': 'sgd/moment'}}
        >>> list(tensors)
        ['sgd/moment']
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float | np.integer | np.floating):
        return _number(value)
    if isinstance(value, Tensor):
        tensors[path] = _dense(value, path)
        return {"$tensor": path}
    if isinstance(value, Counter):
        return {"$counter": _items(value, path, tensors)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, f"{path}/{key}", tensors) for key, item in value.items()}
        return {"$items": _items(value, path, tensors)}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [encode(item, f"{path}/{place}", tensors) for place, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    raise ConfigError(
        f"{path}, a {type(value).__name__}, to be saved",
        _KINDS,
        "leave it out of the state and make it anew after loading, or save it in a file of your"
        " own",
    )


def decode(value: object, tensors: Mapping[str, Tensor]) -> Any:
    """What :func:`encode` was given; mappings are dicts, numbers of NumPy are Python's.

    Raises:
        CheckpointError: when a tensor is missing.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind: str = ""
    content: Any = None
    if len(value) == 1:
        kind, content = next(iter(value.items()))
    if kind == "$tensor":
        if not isinstance(content, str) or content not in tensors:
            raise CHECKPOINT(f"no tensor {_short(content)} in the checkpoint", "all that it names")
        return tensors[content]
    try:
        if kind == "$float":
            return _FLOATS[content]
        if kind == "$tuple":
            return tuple(decode(item, tensors) for item in content)
        if kind in ("$items", "$counter"):
            pairs = {decode(key, tensors): decode(item, tensors) for key, item in content}
            return Counter(pairs) if kind == "$counter" else pairs
    except (KeyError, TypeError, ValueError) as error:
        got = f"a value {kind!r} in the checkpoint that holds {_short(content)}"
        raise CHECKPOINT(got, "what pibroch.save writes") from error
    return {key: decode(item, tensors) for key, item in value.items()}


def _number(value: int | float | np.integer[Any] | np.floating[Any]) -> object:
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, float) and not math.isfinite(plain):
        return {
            "$float": next(
                name for name, known in _FLOATS.items() if repr(known) == repr(float(plain))
            )
        }
    return float(plain) if isinstance(plain, float) else int(plain)


def _items(value: Mapping[Any, object], path: str, tensors: dict[str, Tensor]) -> list[list[Any]]:
    return [
        [encode(key, f"{path}/a key", tensors), encode(item, f"{path}/{key}", tensors)]
        for key, item in value.items()
    ]


def _dense(tensor: Tensor, path: str) -> Tensor:
    if (
        type(tensor) not in (Tensor, nn.Parameter)
        or tensor.layout != torch.strided
        or tensor.is_meta
    ):
        raise ConfigError(
            f"{path}, a {type(tensor).__name__} ({tensor.layout}, on {tensor.device}), to be saved",
            "a dense tensor that is all in this process",
            "gather it first, or save by torch.distributed.checkpoint with embeddings.stateful()",
        )
    return tensor.detach()


def _short(value: object) -> str:
    return f"{value!r:.60}"
