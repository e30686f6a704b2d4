"""A transformer over stages, fed with micro-batches.

Distributed autograd goes back through all of them.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workers.rpc_case_sizes import Sizes
from benchmarks.workers.rpc_case_weights import seeded
from benchmarks.workers.rpc_library import DistributedOptimizer, autograd, rpc

VOCABULARY = 64
HEADS = 4
LEARNING_RATE = 0.05


class Stage(nn.Module):
    """Some layers: the first stage embeds tokens, the last one computes the loss."""

    def __init__(self, place: int, sizes: Sizes) -> None:
        super().__init__()
        self.is_first = place == 0
        self.is_last = place == sizes.workers - 1
        width = sizes.width
        self.tokens = nn.Embedding(VOCABULARY, width) if self.is_first else nn.Identity()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, HEADS, 4 * width, 0.0, batch_first=True)
            for _ in range(sizes.layers)
        )
        self.head = nn.Linear(width, VOCABULARY) if self.is_last else nn.Identity()
        self.mask = nn.Transformer.generate_square_subsequent_mask(sizes.length)
        self.one_at_a_time = threading.Lock()
        seeded(self, place)

    def compute(self, reference: Any) -> Tensor:
        """Our part of the work on a micro-batch, which lies where the stage before has made it."""
        x = reference.to_here()
        with self.one_at_a_time:
            return self.layer_by_layer(x)

    def layer_by_layer(self, x: Tensor) -> Tensor:
        """Tokens or hidden states to hidden states, or to scores."""
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x, self.mask, is_causal=True)
        result: Tensor = self.head(x)
        return result

    def loss(self, reference: Any, targets_BL: Tensor) -> Tensor:
        """Of the last stage."""
        scores_BLV = self.compute(reference)
        return nn.functional.cross_entropy(scores_BLV.flatten(0, 1), targets_BL.flatten())

    def parameter_references(self) -> list[Any]:
        """Of all parameters."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def sequences(number: int, sizes: Sizes) -> Tensor:
    """A batch of tokens ``[B, L + 1]``: two random ones that take turns."""
    generator = torch.Generator().manual_seed(number)
    pair = torch.randint(VOCABULARY, (sizes.sequences, 2), generator=generator)
    return pair.repeat(1, sizes.length)[:, : sizes.length + 1]


class Pipeline:
    """The driver's side: it has no layers."""

    def __init__(self, workers: list[str], sizes: Sizes) -> None:
        self._sizes = sizes
        self._stages = [
            rpc.remote(worker, Stage, args=(place, sizes)) for place, worker in enumerate(workers)
        ]
        parameters = [
            each for stage in self._stages for each in stage.rpc_sync().parameter_references()
        ]
        self._optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=LEARNING_RATE)

    def step(self, number: int) -> float:
        """One global batch."""
        tokens = sequences(number, self._sizes)
        with autograd.context() as context:
            losses = [self._start(part) for part in tokens.chunk(self._sizes.parts)]
            loss = torch.stack([each.wait() for each in losses]).mean()
            autograd.backward(context, [loss])
            self._optimizer.step(context)
        return loss.item()

    def _start(self, tokens_BL: Tensor) -> Any:
        """Send a micro-batch through the stages; a future of its loss."""
        reference = rpc.RRef(tokens_BL[:, :-1])
        for stage in self._stages[:-1]:
            reference = stage.remote().compute(reference)
        return self._stages[-1].rpc_async().loss(reference, tokens_BL[:, 1:])
