"""One step in several passes through the dense layers, as ``train.accumulate`` asks for.

Rows are looked up once for all samples of a step and updated once, by what the passes leave at
their embeddings: to an exchange it is a step of one large batch. The dense layers take the samples
in passes, each forward and backward, so that activations of one pass at a time are in memory. The
gradients of all passes leave in one backward pass, and travel once.

Shape legend: B_r samples of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pibroch.data import JaggedBatch
from pibroch.data.batch import Assigned
from pibroch.errors import ConfigError
from pibroch.exchange.output import EmbeddingOutput
from pibroch.exchange.towers.modules import PlacedTowers

T = TypeVar("T")
LogitsOf = Callable[[JaggedBatch, Callable[[], Tensor | EmbeddingOutput]], Tensor]
"""Logits of some samples, which come without their ids, and of what was looked up for them."""
_DO = "leave train.accumulate out, or"


class Passes:
    """The passes of a rank's steps.

    Args:
        model: the dense layers.
        most_samples: of this rank in a pass.

    Attributes:
        num_samples: B_r of the step under way, by which the ranks' gradients are weighted.
    """

    def __init__(self, model: nn.Module, most_samples: int) -> None:
        self._model = model
        self._most_samples = most_samples
        self.num_samples = 0

    def samples_of_call(self, *_: object, **__: object) -> int:
        """What :func:`pibroch.data_parallel` is to count for any call of the model."""
        return self.num_samples

    def run(
        self,
        batch: JaggedBatch,
        embedded: Tensor | EmbeddingOutput,
        logits_of: LogitsOf,
        criterion: Callable[[Tensor, JaggedBatch], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The mean loss of this rank's samples, and their logits.

        The gradients have been worked out: the loss's backward hands them on.

        Args:
            batch: all of the step that this rank has.
            embedded: what was looked up for it.
            logits_of: by the model.
            criterion: a mean over samples.
        """
        self.num_samples = batch.batch_size
        parts = list(_parts(batch, self._most_samples))
        pieces = embedded.split([part.batch_size for part in parts])
        weights = [p for p in self._model.parameters() if p.requires_grad and p.numel()]
        sums: list[Tensor | None] = [None] * len(weights)
        roots: list[Tensor] = []
        at_roots: list[Tensor | None] = []
        all_logits = []
        total = torch.zeros(())
        for part, piece in zip(parts, pieces, strict=True):
            tensors = [piece] if isinstance(piece, Tensor) else piece.tensors
            leaves = [each.detach().requires_grad_() for each in tensors]
            given = leaves[0] if isinstance(piece, Tensor) else piece.with_tensors(leaves)
            logits = logits_of(part, partial(_same, given))
            loss = criterion(logits, part) * (part.batch_size / max(1, batch.batch_size))
            gradients = torch.autograd.grad(loss, [*leaves, *weights], allow_unused=True)
            sums = [_sum(*each) for each in zip(sums, gradients[len(leaves) :], strict=True)]
            roots += tensors
            at_roots += gradients[: len(leaves)]
            all_logits.append(logits.detach())
            total += loss.detach().cpu()
        value: Tensor = _Handed.apply(total, [*at_roots, *sums], *roots, *weights)
        return value, torch.cat(all_logits)


def check_accumulation(model: nn.Module, compares: bool) -> None:
    """Refuse what gives other numbers in passes than for a step's samples together.

    Args:
        model: the dense layers, in their places.
        compares: whether a sample's loss depends on other samples.

    Raises:
        ConfigError: for losses that compare samples, batch norm, and towers that run inside the
            lookup.
    """
    if compares:
        raise ConfigError(
            "train.accumulate with a loss that compares the samples of a step",
            "a mean over samples: bce, focal or mse",
            f"{_DO} choose another loss",
        )
    modules = list(model.modules())
    if any(isinstance(module, _BatchNorm) for module in modules):
        raise ConfigError(
            "train.accumulate with batch norm, whose moments would be those of a pass",
            "layers that take each sample for itself",
            f"{_DO} set model.batch_norm = false",
        )
    if any(isinstance(module, PlacedTowers) for module in modules):
        raise ConfigError(
            "train.accumulate with towers that run inside the lookup, for other ranks' samples too",
            "all dense layers behind the lookup",
            f"{_DO} train the model under another exchange than towers",
        )


class _Handed(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.known = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        assert gradients[0].item() == 1.0, "a loss is where a backward pass begins"
        known = ctx.known
        ctx.known = None
        return (None, None, *known)


def _same(value: T) -> T:
    return value


def _sum(before: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if before is None or gradient is None:
        return gradient if before is None else before
    return before.add_(gradient)


_OF_SAMPLES = ("dense", "labels", "sample_weights", "groups", "event_times")


def _parts(batch: JaggedBatch, most_samples: int) -> Iterator[JaggedBatch]:
    """A batch in parts of at most so many samples, with empty bags; one of none is one part."""
    size = batch.batch_size
    sizes = [min(most_samples, size - first) for first in range(0, size, most_samples)] or [0]
    for first, end in pairwise(accumulate(sizes, initial=0)):
        here = slice(first, end)
        assigned = batch.assigned
        of_samples: dict[str, Any] = {
            name: None if (every := getattr(batch, name)) is None else every[here]
            for name in _OF_SAMPLES
        }
        yield replace(
            batch,
            values=torch.empty(0, dtype=torch.int64),
            offsets=torch.zeros(len(batch.keys) * (end - first) + 1, dtype=torch.int64),
            weights=None,
            fresh=None,
            first_sample=batch.first_sample + (first if assigned is None else 0),
            assigned=None if assigned is None else Assigned(assigned.places[here], 0, 0),
            **of_samples,
        )
