"""Sums of gradients over ranks, which travel while backward runs.

Shape legend: B_r samples of rank r, B of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from pibroch.collectives.ranks import Channel
from pibroch.collectives.samples import tensors_of
from pibroch.collectives.transport import Wait
from pibroch.errors import TrainingError

BUCKET_BYTES = 1 << 20
"""Gradients that travel together, at least.

DLRM's top network (13-512-256-64, 512-256-1) fills one bucket, which travels while the rest is
computed. Between two ranks on loopback a step took as long as under torch's DDP, within noise;
buckets of 256 KiB cost 2 to 14 ms more.
"""


class GradientReducer:
    """Adds to ``grad`` the mean over ranks, weighted with their samples, or the plain sum.

    Hooks of the parameters keep this object, which holds them weakly: references from hooks to a
    tensor are not seen by Python's collector, and a dropped model would never be freed.

    Args:
        channel: for this alone.
        parameters: in the order in which the model uses them, about.
        is_mean: whether :meth:`count` says how much this rank's gradients of a forward pass weigh.
    """

    def __init__(
        self, channel: Channel, parameters: list[nn.Parameter], is_mean: bool = True
    ) -> None:
        self.channel = channel
        self.is_mean = is_mean
        self.buckets = [_Bucket(group) for group in _groups(parameters)]
        self._backward: int | None = None
        self._num_sent = 0
        self._not_tracked = set[int]() if is_mean else {1}
        self._waiting = set[int]()
        self._passed = set[int]()
        self._passed_in: int | None = None

    def hooks(self) -> Iterator[tuple[nn.Parameter, list[RemovableHandle]]]:
        """Attach this to each parameter."""
        for bucket in self.buckets:
            for place, reference in enumerate(bucket.parameters):
                parameter = reference()
                assert isinstance(parameter, nn.Parameter)  # the caller has it
                yield (
                    parameter,
                    [
                        parameter.register_hook(partial(bucket.keep_earlier, place)),
                        parameter.register_post_accumulate_grad_hook(
                            partial(self._arrived, bucket, place)
                        ),
                    ],
                )

    def count(self, num_samples: int, outputs: object) -> None:
        """Note the samples of a forward pass: backward passes through its outputs weigh by them."""
        tracked = [tensor for tensor in tensors_of(outputs) if tensor.grad_fn is not None]
        for tensor in tracked:
            tensor.register_hook(lambda _: self._pass(num_samples))
        self._waiting.add(num_samples)
        self._not_tracked = set() if tracked else {num_samples}

    def _arrived(self, bucket: _Bucket, place: int, _: Tensor) -> None:
        """A gradient is complete: send all buckets that now are.

        They go in their order, which is the same on all ranks.
        """
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._begin(backward)
        bucket.reached.add(place)
        while self._num_sent < len(self.buckets) and self.buckets[self._num_sent].is_complete:
            self._send()

    def _pass(self, num_samples: int) -> None:
        """A backward pass goes through what a forward pass gave."""
        backward = torch._C._current_graph_task_id()
        if backward != self._passed_in:
            self._passed_in = backward
            self._passed = set()
        self._passed.add(num_samples)

    def _begin(self, backward: int) -> None:
        if self._passed_in != backward:  # the loss is of other things than the model returned
            self._passed_in = backward
            self._passed = set(self._waiting or self._not_tracked)
        if not self._passed:
            raise TrainingError(
                "a backward pass before any forward pass of a data-parallel model",
                "a call of the model itself",
                "call model(...), which counts the samples, not a part of it",
            )
        self._waiting = set()
        self._backward = backward
        self._num_sent = 0
        for bucket in self.buckets:
            bucket.reached.clear()
        Variable._execution_engine.queue_callback(self._send_rest)

    def _send(self) -> None:
        self.buckets[self._num_sent].send(self.channel, self._passed)
        self._num_sent += 1

    def _send_rest(self) -> None:
        while self._num_sent < len(self.buckets):
            self._send()
        # last: what others start now runs beside the waiting
        Variable._execution_engine.queue_callback(self._receive)

    def _receive(self) -> None:
        agree = [bucket.receive(self.is_mean) for bucket in self.buckets]
        self._backward = None
        if not all(agree):
            raise TrainingError(
                "a backward pass through several calls of a data-parallel model with different "
                f"numbers of samples, on this rank {sorted(self._passed)}",
                "calls of one number of samples in a backward pass, on each rank",
                "call backward for each call, or say what number the loss is a mean over: "
                "data_parallel(model, num_samples=...)",
            )


def _groups(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Groups of parameters, from the last one to the first.

    Each is of one device and type and of at least BUCKET_BYTES, where that can be.
    """
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

    ``flat`` holds their gradients times B_r, for each whether backward reached it here, and B_r:
    what is needed comes in one sum over ranks. Where a rank does not know one B_r it is not a
    number, and so is the sum, on all ranks.

    Attributes:
        parameters: weak references.
        reached: by this backward pass here, by place among the parameters.
        earlier: gradients of earlier passes, by place.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = [TensorWeakRef(parameter) for parameter in parameters]
        self.reached = set[int]()
        self.earlier = dict[int, Tensor]()
        sizes = [parameter.numel() for parameter in parameters]
        count = len(parameters)
        first = parameters[0]
        self.flat = torch.zeros(
            sum(sizes) + count + 1, dtype=_wire_dtype(first), device=first.device
        )
        self._gradients = self.flat[: sum(sizes)]
        self._tail = self.flat[sum(sizes) :]
        views = self._gradients.split(sizes)
        self._views = [
            view.view_as(parameter) for view, parameter in zip(views, parameters, strict=True)
        ]
        self._wait: Wait = lambda: None

    @property
    def is_complete(self) -> bool:
        """Whether every gradient is there."""
        return len(self.reached) == len(self.parameters)

    def keep_earlier(self, place: int, _: Tensor) -> None:
        """Set aside what earlier passes left.

        Before this one's gradient comes, to be summed alone.
        """
        parameter = self.parameters[place]()
        self.earlier.pop(place, None)  # of a pass that failed
        if parameter is not None and parameter.grad is not None:
            self.earlier[place] = parameter.grad
            parameter.grad = None

    @torch.no_grad()
    def send(self, channel: Channel, counts: Collection[int]) -> None:
        """Start the sum over ranks, weighted with the samples here; several counts are none."""
        num_samples, *others = counts
        self.flat.zero_()
        for place in self.reached if num_samples else ():
            parameter = self.parameters[place]()
            if parameter is not None and parameter.grad is not None:
                self._views[place].copy_(parameter.grad).mul_(num_samples)
        reached = [float(place in self.reached) for place in range(len(self.parameters))]
        self._tail.copy_(torch.tensor([*reached, torch.nan if others else num_samples]))
        self._wait = channel.all_reduce(self.flat)

    @torch.no_grad()
    def receive(self, is_mean: bool) -> bool:
        """Wait for the sum and add it, or the mean over samples, to what earlier passes left.

        Returns:
            Whether the number of samples is known. If not, all is as before the pass.
        """
        self._wait()
        *reached, num_samples = self._tail.tolist()
        is_known = not math.isnan(num_samples)
        if is_mean and is_known:
            self._gradients.div_(max(1.0, num_samples))
        for place, (view, reference) in enumerate(zip(self._views, self.parameters, strict=True)):
            parameter = reference()
            if parameter is None or not reached[place]:
                continue
            here = place in self.reached
            earlier = self.earlier.pop(place, None)
            if not is_known:
                parameter.grad = earlier if here else parameter.grad
            elif not here and parameter.grad is not None:
                parameter.grad.add_(view)
            elif earlier is not None:
                parameter.grad = earlier.add_(view)
            elif parameter.grad is not None:
                parameter.grad.copy_(view)
            else:
                parameter.grad = view.to(parameter.dtype, copy=True)
        return is_known
