"""What the DLRM contenders share: dense layers, batches, the check.

Torch alone, no pibroch, no TorchRec.

Shape legend: B samples, F features, D dim, n dense features.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.cases import BOTTOM_STREAM, TOP_STREAM, Arrays, Case, initial_layers, lower_pairs

Step = Callable[[int], Tensor]


def load_linears(layers: list[nn.Linear], case: Case, stream: int) -> None:
    """Copy the case's starting weights into ``layers``."""
    with torch.no_grad():
        for layer, (weight, bias) in zip(layers, initial_layers(case, stream), strict=True):
            layer.weight.copy_(torch.from_numpy(weight))
            layer.bias.copy_(torch.from_numpy(bias))


def linears(module: nn.Module) -> list[nn.Linear]:
    """The linear layers of a module in order."""
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def perceptron(sizes: tuple[int, ...], last_relu: bool) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(sizes):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class PlainDense(nn.Module):
    """DLRM's dense part as written in plain torch.

    ``dense [B, n], embedded [B, F, D]`` to logits ``[B]``.

    Pairs are picked by ``index_select``, which beat the usual double index and ``gather`` when
    tried.
    """

    pairs: Tensor

    def __init__(self, case: Case) -> None:
        super().__init__()
        nodes = case.num_tables + 1
        self.bottom = perceptron(case.bottom_sizes, last_relu=True)
        self.top = perceptron(case.top_sizes, last_relu=False)
        first, second = lower_pairs(nodes)
        self.register_buffer("pairs", torch.from_numpy(first * nodes + second))
        load_linears(linears(self.bottom), case, BOTTOM_STREAM)
        load_linears(linears(self.top), case, TOP_STREAM)

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits ``[B]``."""
        hidden = self.bottom(dense)
        nodes = torch.cat([hidden.unsqueeze(1), embedded], 1)
        products = torch.bmm(nodes, nodes.transpose(1, 2)).flatten(1)
        logits: Tensor = self.top(torch.cat([hidden, products.index_select(1, self.pairs)], 1))
        return logits.squeeze(1)


class TrainingSubject:
    """A contender that trains: one timed phase, ``step``, and a check.

    The check returns losses and how far rows moved.

    Args:
        step: train on a stored batch, return the loss.
        embed: look a stored batch up, ``[B, F, D]`` in any layout, without changing anything.
        versions: packages that matter.
        num_batches: stored batches N.
    """

    def __init__(self, step: Step, embed: Step, versions: dict[str, str], num_batches: int) -> None:
        self._step = step
        self._embed = embed
        self._versions = versions
        self._num_batches = num_batches

    def phases(self) -> dict[str, Callable[[int], object]]:
        """Training steps on the stored batches in turn."""
        return {"step": lambda batch: self._step(batch % self._num_batches)}

    def check(self, steps: int) -> dict[str, list[float]]:
        """``loss`` and ``row_movement`` of each step.

        A batch comes twice in a row, so that a lost update shows.
        """
        values: dict[str, list[float]] = {"loss": [], "row_movement": []}
        for batch in (step // 2 % self._num_batches for step in range(steps)):
            with torch.no_grad():
                before = self._embed(batch).clone()
            values["loss"].append(float(self._step(batch)))
            with torch.no_grad():
                values["row_movement"].append(movement(before, self._embed(batch)))
        return values

    def versions(self) -> dict[str, str]:
        """Versions of the packages used."""
        return self._versions


def movement(before: Tensor, after: Tensor) -> float:
    """Sum of absolute differences, in double precision.

    A few samples at a time, since peak memory is measured too.
    """
    pairs = zip(after.split(64), before.split(64), strict=True)
    return sum(float((own.double() - other.double()).abs().sum()) for own, other in pairs)


def torch_batches(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """All batches as tensors: ids ``[N, F, B]``, dense ``[N, B, n]``, labels ``[N, B]``.

    Also sets torch's threads.
    """
    torch.set_num_threads(case.threads)
    arrays = Arrays.load(case.data)
    return (
        torch.from_numpy(arrays.ids),
        torch.from_numpy(arrays.dense),
        torch.from_numpy(arrays.labels),
    )
