"""Checks of a minibatch before kernels read it, as these follow its offsets unchecked.

They cost O(F * B), and O(V) where a batch has weights: 10 and 30 us at F = 26, B = 2048. F
features, B samples, V ids.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data.kernels.samples import first_fall, first_not_finite
from pibroch.errors import DataError

_BUILD = "build batches with pibroch's loader or JaggedBatch.from_*"
_CPU = torch.device("cpu")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_batch(
    keys: tuple[str, ...],
    dense: Tensor,
    values: Tensor,
    offsets: Tensor,
    labels: Tensor,
    weights: Tensor | None,
) -> None:
    """See :meth:`JaggedBatch.validate`."""
    _check_tensor("dense", dense)
    _check_tensor("values", values)
    _check_tensor("offsets", offsets)
    _check_tensor("labels", labels)
    _check_keys(keys)
    if labels.ndim not in (1, 2):
        _refuse(f"labels {list(labels.shape)}", "[B] or [B, T]")
    size = labels.shape[0]  # len() of a tensor is a function of Python's
    if dense.dtype != torch.float32 or dense.ndim != 2 or dense.shape[0] != size:
        _refuse(f"dense {_shown(dense)}", f"float32 [{size}, n], a row for each label")
    if values.dtype != torch.int64 or values.ndim != 1:
        _refuse(f"values {_shown(values)}", "int64 [V]")
    if offsets.dtype != torch.int64 or offsets.ndim != 1:
        _refuse(f"offsets {_shown(offsets)}", "int64 [F * B + 1]")
    if offsets.shape[0] != len(keys) * size + 1:
        need = f"F * B + 1 = {len(keys)} * {size} + 1"
        _refuse(f"{len(offsets)} offsets for {len(keys)} keys and {size} labels", need)
    _check_offsets(keys, offsets.numpy(), values.shape[0])
    if weights is not None:
        _check_weights(weights, values.shape[0])


def check_samples(
    size: int,
    sample_weights: Tensor | None,
    groups: Tensor | None,
    event_times: Tensor | None = None,
) -> None:
    """See :meth:`JaggedBatch.validate`."""
    for name, tensor, dtype in (
        ("sample_weights", sample_weights, torch.float32),
        ("groups", groups, torch.int64),
        ("event_times", event_times, torch.int64),
    ):
        if tensor is None:
            continue
        _check_tensor(name, tensor)
        if tensor.dtype != dtype or tuple(tensor.shape) != (size,):
            need = f"{str(dtype).removeprefix('torch.')} [{size}], one a sample"
            _refuse(f"{name} {_shown(tensor)}", need)


def _check_offsets(keys: Sequence[str], offsets: NDArray[np.int64], num_values: int) -> None:
    if offsets[0] != 0:
        _refuse(f"first offset {offsets[0]}", "0")
    if offsets[-1] != num_values:
        _refuse(f"last offset {offsets[-1]}", f"the number of values, {num_values}")
    bag = first_fall(offsets)
    if bag >= 0:
        feature, sample = divmod(bag, (len(offsets) - 1) // len(keys))
        place = f"after {offsets[bag]} for feature {keys[feature]!r} in sample {sample}"
        _refuse(f"offset {offsets[bag + 1]} {place}", "offsets that never fall")


def _check_weights(weights: Any, num_values: int) -> None:
    _check_tensor("weights", weights)
    if not weights.is_floating_point() or tuple(weights.shape) != (num_values,):
        _refuse(f"weights {_shown(weights)} for {num_values} values", "float32, one per value")
    place = first_not_finite(weights.detach().contiguous().float().numpy())
    if place >= 0:
        _refuse(
            f"weight {float(weights[place])} of value {place}",
            "finite weights, within the range of float32",
        )


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        _refuse(
            f"{name} that are a {type(tensor).__name__}",
            "a torch tensor",
            "convert it, e.g. by torch.from_numpy",
        )
    if tensor.device != _CPU or tensor.layout != torch.strided:
        _refuse(
            f"{name} that are {tensor.layout} on {tensor.device}",
            "a dense tensor on the CPU",
            "call .cpu()",
        )


def _check_keys(keys: object) -> None:
    if isinstance(keys, tuple):
        with suppress(TypeError):  # some cannot be hashed, so are no names
            return _check_names(keys)
    _check_names.__wrapped__(keys)


@lru_cache(maxsize=64)
def _check_names(keys: Hashable) -> None:
    """Refuse what is no names; remembers those that are, as batches share theirs."""
    if not isinstance(keys, tuple | list) or not all(isinstance(key, str) for key in keys):
        _refuse(f"keys {keys!r:.80}", "a tuple of feature names")
    if not keys:
        _refuse("no keys", "at least one feature")
    if len(set(keys)) < len(keys):
        _refuse(
            f"key {next(key for key in keys if keys.count(key) > 1)!r} twice", "each feature once"
        )


def check_keyed(jagged: Any, keys: Sequence[str], values: Any, lengths: Any) -> None:
    """Raise DataError unless what an object with TorchRec's methods gives can become a batch.

    Args:
        jagged: the object.
        keys: what its ``keys()`` returned.
        values: likewise, ids.
        lengths: likewise, ids per bag.
    """
    for name, tensor in (("values", values), ("lengths", lengths)):
        _check_tensor(name, tensor)
        if tensor.dtype not in _INTEGERS or tensor.ndim != 1:
            _refuse(
                f"{name} {_shown(tensor)}",
                "one dimension of whole numbers",
                "call .long(), where that loses nothing",
            )
    sizes = _call(jagged, "stride_per_key")
    varies = len(set(sizes)) > 1 if sizes else bool(_call(jagged, "variable_stride_per_key"))
    if varies or _call(jagged, "inverse_indices_or_none") is not None:
        raise DataError(
            f"a {type(jagged).__name__} with a batch size for each"
            f" key{f', {list(sizes)}' if sizes else ''}",
            "one batch size for all keys, and no inverse indices",
            "build it without stride_per_key_per_rank: a sample without ids of a key has length 0"
            " there",
        )
    size = _call(jagged, "stride")
    if (
        not keys
        or len(lengths) % len(keys)
        or (size is not None and size * len(keys) != len(lengths))
    ):
        samples = "" if size is None else f" and {size} samples"
        _refuse(
            f"{len(lengths)} lengths for {len(keys)} keys{samples}",
            "the same number of samples for each key",
        )


def _call(thing: object, name: str) -> Any:
    """What a method returns, ``None`` where there is no such method."""
    method: Callable[[], Any] | None = getattr(thing, name, None)
    return method() if callable(method) else None


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _refuse(got: str, need: str, do: str = _BUILD) -> NoReturn:
    raise DataError(f"a batch with {got}", need, do)
