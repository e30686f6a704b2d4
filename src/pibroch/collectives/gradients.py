"""Sums of gradients over ranks, which travel while backward runs.

Shape legend: B_r samples of rank r, B of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby

import torch
from torch import nn
from torch.autograd import Variable

from pibroch.collectives.channel import Channel
from pibroch.errors import TrainingError

BUCKET_BYTES = 1 << 20
"""Gradients that travel together, at least. DLRM's top network (13-512-256-64, 512-256-1) fills one bucket, which travels
while the rest is computed. Between two ranks on loopback a step took as long as under torch's DDP, within noise; buckets of
256 KiB cost 2 to 14 ms more."""


class GradientReducer:
    """Leaves in ``grad`` the mean over ranks, weighted with their samples, or the plain sum.

    Args:
        channel: for this alone.
        parameters: in the order in which the model uses them, about.
        is_mean: whether :meth:`count` says before each backward how much this rank's gradients weigh.
    """

    def __init__(
        self, channel: Channel, parameters: list[nn.Parameter], is_mean: bool = True
    ) -> None:
        self.channel, self.is_mean = channel, is_mean
        self.buckets = [_Bucket(group) for group in _groups(parameters)]
        self.num_samples = None if is_mean else 1
        self._backward: int | None = None
        self._num_sent = 0
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(_arrival(self, bucket))

    def count(
        self, samples: Callable[..., int], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        """Note the samples of a forward pass, as ``samples`` gives them; evaluation does not count."""
        if torch.is_grad_enabled():
            self.num_samples = int(samples(*args, **kwargs))

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
        Variable._execution_engine.queue_callback(
            self._receive
        )  # last: what others start now runs beside the waiting

    def _receive(self) -> None:
        for bucket in self.buckets:
            bucket.receive(self.is_mean)
        self._backward = None


def _arrival(gradients: GradientReducer, bucket: _Bucket) -> Callable[[nn.Parameter], None]:
    return lambda parameter: gradients.arrived(bucket, parameter)


def _groups(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """From the last parameter to the first, groups of one device and type of at least BUCKET_BYTES where they can be."""
    for _, alike in groupby(
        reversed(parameters), key=lambda parameter: (parameter.device, _wire_dtype(parameter))
    ):
        group: list[nn.Parameter] = []
        for parameter in alike:
            group.append(parameter)
            if (
                sum(each.numel() for each in group) * _wire_dtype(parameter).itemsize
                >= BUCKET_BYTES
            ):
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
        self.flat = torch.zeros(
            sum(sizes) + count + 1, dtype=_wire_dtype(first), device=first.device
        )
        self._gradients, self._tail = self.flat[: sum(sizes)], self.flat[sum(sizes) :]
        views = self._gradients.split(sizes)
        self._views = [
            view.view_as(parameter) for view, parameter in zip(views, parameters, strict=True)
        ]
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
    def receive(self, is_mean: bool) -> None:
        """Wait for the sum and write it, or the mean over samples, back."""
        self._wait()
        *reached, num_samples = self._tail.tolist()
        if is_mean:
            self._gradients.div_(max(1.0, num_samples))
        for view, parameter, is_reached in zip(self._views, self.parameters, reached, strict=True):
            if is_reached and parameter.grad is not None:
                parameter.grad.copy_(view)
            elif is_reached:
                parameter.grad = view.to(parameter.dtype, copy=True)
