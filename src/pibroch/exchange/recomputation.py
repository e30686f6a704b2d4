"""Lookups that activation checkpointing repeats inside a backward pass: they get the same rows.

The pass may have updated the rows since, and to look up again would cost messages between ranks. So
the result of a lookup is kept where its forward pass may be repeated, as long as its graph lives.
What happens inside is hidden from modes of torch that count operations, as those of selective
checkpointing do: the second time there are fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pibroch.data import JaggedBatch
from pibroch.errors import TrainingError

hidden = _disable_current_modes
"""A context in which torch's dispatch modes see nothing."""
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def backward_pass() -> int | None:
    """Which backward pass this thread is in; ``None`` outside."""
    number: int = torch._C._current_graph_task_id()
    return None if number < 0 else number


def may_be_repeated() -> bool:
    """Whether a backward pass may repeat this forward pass: hooks decide what autograd saves."""
    return _top_hooks(False) is not None


@dataclass(slots=True, eq=False, weakref_slot=True)
class KeptLookup:
    """The result of a lookup."""

    batch: JaggedBatch
    given: tuple[Tensor, ...]


class KeptLookups:
    """Results of lookups whose owners, nodes of autograd's graph, are alive.

    Attributes:
        updated_in: the last backward pass that updated rows.
    """

    def __init__(self) -> None:
        self.updated_in: int | None = None
        self._kept: WeakValueDictionary[int, KeptLookup] = WeakValueDictionary()
        self._numbers = count()

    def keep(self, batch: JaggedBatch, given: Sequence[Tensor]) -> KeptLookup:
        """Keep a copy of a lookup's result, as long as the caller holds what this returns."""
        kept = KeptLookup(batch, tuple(tensor.detach().clone() for tensor in given))
        self._kept[next(self._numbers)] = kept
        return kept

    def find(self, batch: JaggedBatch) -> tuple[Tensor, ...]:
        """The result for the same ids, in new tensors whose gradients lead nowhere.

        Raises:
            TrainingError: when nothing was kept, or rows changed between two lookups of the same
                ids.
        """
        with hidden():
            return self._find(batch)

    def _find(self, batch: JaggedBatch) -> tuple[Tensor, ...]:
        same = [each.given for each in self._kept.values() if _same_ids(each.batch, batch)]
        if not same:
            raise TrainingError(
                "a lookup to be trained on inside a backward pass, which may have updated its rows"
                " already",
                "lookups in the forward pass, or ones that activation checkpointing repeats without"
                " reentry",
                "checkpoint(..., use_reentrant=False), or look up before the checkpointed block",
            )
        if not all(all(map(torch.equal, each, same[0])) for each in same[1:]):
            raise TrainingError(
                "a lookup to be made again, of ids that were looked up before and after an update",
                "one of them between two updates",
                "call backward for one forward pass before the next one",
            )
        return tuple(tensor.detach().requires_grad_().clone() for tensor in same[0])


def _same_ids(one: JaggedBatch, other: JaggedBatch) -> bool:
    if one is other:
        return True
    if one.keys != other.keys or (one.weights is None) != (other.weights is None):
        return False
    pairs = [(one.values, other.values), (one.offsets, other.offsets)]
    if one.weights is not None and other.weights is not None:
        pairs.append((one.weights, other.weights))
    return all(torch.equal(a, b) for a, b in pairs)
