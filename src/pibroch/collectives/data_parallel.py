"""Dense layers over ranks: one model, and gradients of the mean loss over the global batch.

torch's DistributedDataParallel gives each rank the same weight, however many samples it has, renames the parameters, and
hangs or stops where a rank has no samples. What is here weights ranks by their samples and keeps names.

Shape legend: B_r samples of rank r, B of all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm

from pibroch.collectives.channel import Channel
from pibroch.collectives.ranks import Ranks
from pibroch.errors import ConfigError, TrainingError
from pibroch.models.batch_norm import BatchNorm

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=nn.Module)

BUCKET_BYTES = 1 << 20
"""Gradients that travel together, at least. DLRM's top network (13-512-256-64, 512-256-1) fills one bucket, which travels
while the rest is computed. Between two ranks on loopback a step took as long as under torch's DDP, within noise; buckets of
256 KiB cost 2 to 14 ms more."""


def data_parallel(model: M, ranks: Ranks | None = None) -> M:
    """Make ``model`` one model of all ranks; returns it, with hooks attached and nothing renamed.

    Parameters and buffers become those of rank 0, now. From then on each backward leaves in ``grad``, on all ranks the same
    bits, the mean over ranks weighted with the samples that each had in its forward pass: with a loss that is the mean over
    a rank's own samples, the gradient of the mean over the global batch. Sums travel during backward, bucket by bucket from
    the last layer to the first, and are waited for at its end. :class:`pibroch.models.BatchNorm` takes its moments over all
    ranks. In one process nothing is done at all.

    Every rank calls the model and one backward through it in each step, with an empty batch too: ranks wait for each other.
    A rank without samples contributes nothing, be its gradients NaN. A parameter that no rank's backward reached keeps its
    ``grad``. The number of samples is the first dimension of the first tensor (or the ``batch_size`` of the first batch)
    among the arguments of the model's last call. Parameters to be trained must require gradients now; freezing some
    later is fine. Reentrant activation checkpointing is not supported.

    Args:
        model: the same on all ranks but for its numbers.
        ranks: which processes; those of torch.distributed's default group when not given.

    Raises:
        ConfigError: on all ranks, when their models differ in names, shapes or types.
        RankFailedError: here and in each backward, when another rank failed or was lost.
    """
    ranks = Ranks.joined() if ranks is None else ranks
    if ranks.world_size == 1:
        return model
    channel = ranks.open_channel()
    _check_same(channel, model)
    _broadcast(channel, [tensor for _, tensor in _tensors(model)])
    _share_moments(model, ranks)
    gradients = _Gradients(channel, [parameter for parameter in model.parameters() if parameter.requires_grad])
    # lambdas: a deep copy of the model, for averages say, shares them and does not copy what they hold
    model.register_forward_pre_hook(lambda _, args, kwargs: gradients.count(args, kwargs), with_kwargs=True)
    return model


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _check_same(channel: Channel, model: nn.Module) -> None:
    found = channel.gather({name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in _tensors(model)})
    for rank, other in enumerate(found):
        for name in sorted(found[0].keys() | other.keys()):
            here, there = found[0].get(name, "absent"), other.get(name, "absent")
            if here != there:
                raise ConfigError(f"{name}, on rank 0 {here} and on rank {rank} {there}", "one model on all ranks")


def _broadcast(channel: Channel, tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's numbers, bit for bit, to all ranks."""
    with torch.no_grad():
        chosen = [tensor for tensor in tensors if tensor.numel()]
        flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in chosen]
        if not flat:
            return
        sizes, size = [len(part) for part in flat], channel.ranks.world_size
        total = sum(sizes)
        sends = [total] * size if channel.ranks.rank == 0 else [0] * size
        send = torch.cat(flat).repeat(size) if sends[0] else torch.empty(0, dtype=torch.uint8)
        received = channel.all_to_all(send, sends, [total] + [0] * (size - 1))
        for tensor, part in zip(chosen, received.split(sizes), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _share_moments(model: nn.Module, ranks: Ranks) -> None:
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    if norms:
        channel, ones = ranks.open_channel(), [1] * ranks.world_size
        for norm in norms:
            norm.gather = lambda vector: channel.all_to_all(
                vector.expand(ranks.world_size, -1).contiguous(), ones, ones
            )
    if any(isinstance(module, _BatchNorm) and not isinstance(module, BatchNorm) for module in model.modules()):
        logger.warning(
            "torch's batch norm in the model takes the moments of each rank's own samples; "
            "pibroch.models.BatchNorm takes those of the global batch"
        )


class _Gradients:
    """Sums gradients over ranks while backward runs.

    Args:
        channel: for this alone.
        parameters: in the order in which the model uses them, about.
    """

    def __init__(self, channel: Channel, parameters: list[nn.Parameter]) -> None:
        self.channel = channel
        self.buckets = [_Bucket(group) for group in _groups(parameters)]
        self.num_samples: int | None = None
        self._backward: int | None = None
        self._num_sent = 0
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(_arrival(self, bucket))

    def count(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the samples of a forward pass; evaluation does not count."""
        if torch.is_grad_enabled():
            self.num_samples = _num_samples((*args, *kwargs.values()))

    def arrived(self, bucket: _Bucket, parameter: nn.Parameter) -> None:
        """A gradient is complete: send all buckets that now are, in their order, which is the same on all ranks."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._begin(backward)
        bucket.reached.add(parameter)
        while self._num_sent < len(self.buckets) and self.buckets[self._num_sent].is_complete:
            self._send()

    def _begin(self, backward: int) -> None:
        if self.num_samples is None:
            raise TrainingError(
                "a backward pass before any forward pass of a data-parallel model", "a call of the model itself",
                "call model(...), which counts the samples, not a part of it",
            )  # fmt: skip
        self._backward, self._num_sent = backward, 0
        for bucket in self.buckets:
            bucket.reached.clear()
        Variable._execution_engine.queue_callback(self._send_rest)

    def _send(self) -> None:
        assert self.num_samples is not None
        self.buckets[self._num_sent].send(self.channel, self.num_samples)
        self._num_sent += 1

    def _send_rest(self) -> None:
        while self._num_sent < len(self.buckets):
            self._send()
        Variable._execution_engine.queue_callback(self._receive)  # last: what others start now runs beside the waiting

    def _receive(self) -> None:
        for bucket in self.buckets:
            bucket.receive()
        self._backward = None


def _arrival(gradients: _Gradients, bucket: _Bucket) -> Callable[[nn.Parameter], None]:
    return lambda parameter: gradients.arrived(bucket, parameter)


def _groups(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """From the last parameter to the first, groups of one device and type of at least BUCKET_BYTES where they can be."""
    for _, alike in groupby(reversed(parameters), key=lambda parameter: (parameter.device, _wire_dtype(parameter))):
        group: list[nn.Parameter] = []
        for parameter in alike:
            group.append(parameter)
            if sum(each.numel() for each in group) * _wire_dtype(parameter).itemsize >= BUCKET_BYTES:
                yield group
                group = []
        if group:
            yield group


def _wire_dtype(parameter: nn.Parameter) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


class _Bucket:
    """Parameters whose gradients travel together.

    ``flat`` holds their gradients times B_r, for each whether backward reached it here, and B_r: what is needed comes in
    one sum over ranks.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.reached = parameters, set[nn.Parameter]()
        sizes = [parameter.numel() for parameter in parameters]
        count, first = len(parameters), parameters[0]
        self.flat = torch.zeros(sum(sizes) + count + 1, dtype=_wire_dtype(first), device=first.device)
        self._gradients, self._tail = self.flat[: sum(sizes)], self.flat[sum(sizes) :]
        views = self._gradients.split(sizes)
        self._views = [view.view_as(parameter) for view, parameter in zip(views, parameters, strict=True)]
        self._wait: Callable[[], None] = lambda: None

    @property
    def is_complete(self) -> bool:
        """Whether every gradient is there."""
        return len(self.reached) == len(self.parameters)

    @torch.no_grad()
    def send(self, channel: Channel, num_samples: int) -> None:
        """Start the sum over ranks."""
        self.flat.zero_()
        for view, parameter in zip(self._views, self.parameters, strict=True):
            if num_samples and parameter.grad is not None:
                view.copy_(parameter.grad).mul_(num_samples)
        reached = [float(parameter in self.reached) for parameter in self.parameters]
        self._tail.copy_(torch.tensor([*reached, num_samples]))
        self._wait = channel.all_reduce(self.flat)

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the sum and write the means back."""
        self._wait()
        *reached, num_samples = self._tail.tolist()
        self._gradients.div_(max(1.0, num_samples))
        for view, parameter, is_reached in zip(self._views, self.parameters, reached, strict=True):
            if is_reached and parameter.grad is not None:
                parameter.grad.copy_(view)
            elif is_reached:
                parameter.grad = view.to(parameter.dtype, copy=True)


def _num_samples(arguments: Iterable[Any]) -> int:
    for argument in arguments:
        if isinstance(argument, Tensor) and argument.ndim:
            return len(argument)
        if isinstance(size := getattr(argument, "batch_size", None), int):
            return size
    raise ConfigError("a data-parallel model called without a tensor", "samples along a tensor's first dimension")
