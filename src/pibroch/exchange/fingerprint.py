"""Checksums of a batch that was read ahead, to notice a loader that fills its tensors again."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pibroch.collectives.samples import tensors_of
from pibroch.data import JaggedBatch
from pibroch.errors import DataError


class Fingerprint:
    """Checksums of a batch's tensors, which stay the caller's.

    Copies of ids alone would train them with labels of other samples. Checksums also see what is
    written through NumPy, which torch's counter of changes does not; that counter stands for
    tensors on a device. One takes 0.1 ms for 26 ids of each of 2048 samples.

    Args:
        batch: any object.
        ids: what is looked up of it.
    """

    def __init__(self, batch: object, ids: object) -> None:
        of_ids = {id(each): each for each in _tensors_of_ids(ids)}
        others = {id(each): each for each in tensors_of(batch) if id(each) not in of_ids}
        if isinstance(ids, JaggedBatch) and ids.has_shared_offsets:
            del of_ids[id(ids.offsets)]
        self._ids, self._others = (
            [(tensor, _checksum(tensor)) for tensor in tensors.values()]
            for tensors in (of_ids, others)
        )

    def check_ids(self) -> None:
        """Check the ids, when they are looked up; see :meth:`check_others`."""
        _check(self._ids)

    def check_others(self) -> None:
        """Check all tensors but the ids.

        Raises:
            DataError: when one was written to since.
        """
        _check(self._others)


def _check(tensors: list[tuple[Tensor, int]]) -> None:
    if any(_checksum(tensor) != checksum for tensor, checksum in tensors):
        raise DataError(
            "a batch whose tensors were written to after feed(...) had read it ahead",
            "tensors that stay as they are until the batch was trained on",
            "let the loader make new tensors for each batch, e.g. yield clones of those that it"
            " fills again",
        )


def _tensors_of_ids(ids: Any) -> Iterator[Tensor]:
    if isinstance(ids, JaggedBatch):
        tensors = [ids.values, ids.offsets, ids.weights]
    else:
        weights = getattr(ids, "weights_or_none", lambda: None)()
        tensors = [ids.values(), ids.lengths(), weights]
    yield from (each for each in tensors if isinstance(each, Tensor))


def _checksum(tensor: Tensor) -> int:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return 0 if tensor.is_inference() else tensor._version
    plain = tensor.detach().reshape(-1)
    if plain.stride(0) != 1:  # of one number, none, or one that stands for many
        plain = plain.clone(memory_format=torch.contiguous_format)
    return zlib.crc32(plain.view(torch.uint8).numpy().data)
