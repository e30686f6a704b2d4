"""What labels and weights mean: from raw fields to numbers, and from logits to predictions.

R records, B samples, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data.kernels.text import Bytes, Positions, hash_fields
from pibroch.data.schema import Schema, Target
from pibroch.data.transform import LARGEST

Fields = tuple[Bytes, Positions, Positions]
Read = tuple[NDArray[np.float64], NDArray[np.bool_], str]
"""Numbers ``[R]``, whether they are good ``[R]``, and what a bad one should have been."""


def named_labels(target: Target, fields: Fields) -> Read:
    """The labels in raw fields ``(text, starts [R], ends [R])`` that a target has names for."""
    codes = _codes_of_texts(list(target.values))
    order = np.argsort(codes)
    given = hash_fields(*fields)
    place = np.minimum(np.searchsorted(codes[order], given), len(codes) - 1)
    numbers = np.array(list(target.values.values()))[order][place]
    return numbers, codes[order][place] == given, f"a label must be {_listed(target.values)}"


def checked_labels(
    target: Target, numbers: NDArray[np.float64], good: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], str]:
    """Which of some numbers ``[R]`` are labels ``[R]``, and what they should be."""
    if target.kind == "binary":
        return good & ((numbers == 0) | (numbers == 1)), "a label must be 0 or 1"
    good = good & (np.abs(numbers) <= LARGEST)
    return good, f"a label must be a finite number of at most {LARGEST:.2g}"


def checked_weights(
    numbers: NDArray[np.float64], good: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], str]:
    """Which of some numbers ``[R]`` are weights of samples ``[R]``, and what they should be."""
    fits = good & (numbers >= 0) & (numbers <= np.finfo(np.float32).max)
    return fits, "a weight must be a finite number of at least 0"


def stored_labels(columns: Sequence[NDArray[np.float64]], is_binary: bool) -> NDArray[np.generic]:
    """Labels as a dataset holds them.

    One of 0 and 1 as uint8 ``[R]``, one of numbers as float32 ``[R]``, T of them as float32 ``[R,
    T]``.
    """
    if is_binary:
        return columns[0].astype(np.uint8)
    if len(columns) == 1:
        return columns[0].astype(np.float32)
    return np.stack(columns, 1).astype(np.float32)


def scores_of(logits: Tensor, schema: Schema, logit_labels: Sequence[str] = ()) -> Tensor:
    """As :func:`scores_of_logits`, in float32 and by torch, for what is traced.

    Probabilities of different logits above 8 may tie.
    """
    are_logits = _are_logits(schema, logit_labels)
    if not any(are_logits):
        return torch.sigmoid(logits)
    return torch.where(torch.tensor(are_logits), logits, torch.sigmoid(logits))


def scores_of_logits(
    logits: NDArray[np.float32], schema: Schema, logit_labels: Sequence[str] = ()
) -> NDArray[np.float64]:
    """What logits predict: probabilities of labels of 0 and 1, or the logits themselves.

    In float64, in which probabilities keep the order of logits below 23; in float32 some above 8
    would tie.

    Args:
        logits: ``[B]``, of several tasks ``[B, T]``.
        schema: says which labels hold numbers, which logits predict as they are.
        logit_labels: others whose loss gives no probabilities.
    """
    are_logits = _are_logits(schema, logit_labels)
    # exp(700) is no overflow yet
    scores: NDArray[np.float64] = 1.0 / (
        1.0 + np.exp(-np.maximum(logits, -700.0, dtype=np.float64))
    )
    return np.where(are_logits, logits, scores) if any(are_logits) else scores


def _are_logits(schema: Schema, logit_labels: Sequence[str]) -> list[bool]:
    """Of each task; none where no label is described, and all are probabilities."""
    if not schema.target and not logit_labels:
        return []
    return [
        target.kind == "number" or label in logit_labels for label, target in schema.targets.items()
    ]


def clicks_of(labels: NDArray[Any]) -> NDArray[np.uint8]:
    """Of stored labels whether the first one is above 0, ``[R]``."""
    return ((labels if labels.ndim == 1 else labels[:, 0]) > 0).astype(np.uint8)


def _codes_of_texts(texts: Sequence[str]) -> NDArray[np.uint64]:
    encoded = [text.encode() for text in texts]
    bounds = np.concatenate([[0], np.cumsum([len(text) for text in encoded])]).astype(np.int64)
    buffer = np.frombuffer(b"".join(encoded) or b" ", np.uint8)
    return hash_fields(buffer, bounds[:-1], bounds[1:])


def _listed(texts: Sequence[str] | dict[str, float]) -> str:
    *others, last = map(repr, texts)
    return f"{', '.join(others)} or {last}" if others else last
