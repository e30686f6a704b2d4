"""TorchRec's comparisons of ragged tensors."""

from __future__ import annotations

import torch

from pibroch.torchrec.jagged_tensor import JaggedTensor
from pibroch.torchrec.keyed_jagged_tensor import KeyedJaggedTensor


def jt_is_equal(one: object, other: object) -> bool:
    """Whether both are ragged tensors of the same lengths, and values and weights about equal."""
    if not isinstance(one, JaggedTensor) or not isinstance(other, JaggedTensor):
        return False
    weights = (one.weights_or_none(), other.weights_or_none())
    pairs = [(one.values(), other.values()), (one.lengths(), other.lengths()), weights]
    return all(
        mine is theirs
        or (
            mine is not None
            and theirs is not None
            and mine.shape == theirs.shape
            and torch.allclose(mine.double(), theirs.double())
        )
        for mine, theirs in pairs
    )


def kjt_is_equal(one: object, other: object) -> bool:
    """Whether both have the same keys and lengths, and values and weights about equal.

    Raises:
        DataError: where all this is so, and the lengths are not as many as the values.
    """
    return (
        isinstance(one, KeyedJaggedTensor)
        and isinstance(other, KeyedJaggedTensor)
        and one.keys() == other.keys()
        and one.stride() == other.stride()
        and one.stride_per_key() == other.stride_per_key()
        and jt_is_equal(one, other)
        and one.length_per_key() == other.length_per_key()
    )
