"""The backend ``bls`` of torch.distributed: all-to-all with bounded lag, all else by an inner gloo.

The group's C++ half knows gloo as its backend, so that whatever is not overridden here goes there
without passing through Python.

Threads: besides the callers', gloo's two run its collectives. When one of them lets go of a work
that nobody else holds any more, it holds gloo's queue lock and needs the interpreter to free the
tensors. So no thread may wait for that lock while it holds the interpreter. torch's C++ half of a
group that is a Python class does just that: it takes the interpreter to look for an override and
keeps it when there is none. Everything that it looks for is therefore overridden here, by a call of
a group in C++ alone, whose binding releases the interpreter first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from torch.autograd.profiler import record_function
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not export it by name

from pibroch.collectives.bounded_lag.base import Opening, RankParts
from pibroch.collectives.bounded_lag.exchange import LaggedAllToAll
from pibroch.collectives.bounded_lag.opening import open_lagged_transport
from pibroch.collectives.bounded_lag.options import BoundedLagOptions
from pibroch.collectives.bounded_lag.window import LagWindow
from pibroch.collectives.kernels.ring import copy_bytes
from pibroch.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not export it by name
    from torch.distributed.distributed_c10d import _DistributedBackendOptions  # type: ignore[attr-defined]  # nor this

NAME = "bls"
_NO_TIME = timedelta(milliseconds=0)
_NOTHING = nullcontext()


class LaggedWork(dist.Work):
    """A request under way.

    Nothing makes progress on it but calls of its group and of its methods.
    """

    def __init__(
        self,
        exchange: LaggedAllToAll | None,
        number: int,
        outputs: list[Tensor],
        received: list[Tensor],
    ) -> None:
        super().__init__()
        self._exchange = exchange
        self._number = number
        self._outputs = outputs
        self._received = received

    def wait(self, timeout: timedelta = _NO_TIME) -> bool:
        """Block until this request and all before it are complete; the group's time limit holds."""
        if self._exchange is not None:
            with _span("bls:wait"):
                self._exchange.wait(self._number)
            self._exchange = None
            for output, received in zip(self._outputs, self._received, strict=True):
                if output is not received:
                    output.copy_(received)
        return True

    def is_completed(self) -> bool:
        """Whether a wait would return at once."""
        return self._exchange is None or self._exchange.is_complete(self._number)

    def is_success(self) -> bool:
        """Whether it is complete."""
        return self.is_completed()

    def exception(self) -> None:
        """None: errors are raised by the wait."""

    def result(self) -> list[Tensor]:
        """What came."""
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that is complete.

        Blocks until it can be, as nothing makes progress otherwise.
        """
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future


def _by_gloo(name: str) -> Any:
    """A method that calls the inner group's of the same name, without the interpreter."""

    def call(group: BoundedLagProcessGroup, *args: Any, **kwargs: Any) -> dist.Work:
        work: dist.Work = getattr(group._inner, name)(*args, **kwargs)
        return work

    call.__name__ = name
    call.__doc__ = f"See :meth:`torch.distributed.ProcessGroup.{name}`."
    return call


class BoundedLagProcessGroup(dist.ProcessGroup):
    """See the module. Made by torch.distributed for the backend ``bls``.

    Args:
        store: of the group alone.
        rank: of this process.
        members: the group's ranks by their numbers in the run.
        timeout: of all collectives.
        options: bound and transport.

    Raises:
        ConfigError: for options that cannot be.
        TrainingError: when a rank does not come.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        members: Sequence[int],
        timeout: timedelta,
        options: BoundedLagOptions,
    ) -> None:
        size = len(members)
        bound = options.resolved_bound()  # raises before any rank waits for another
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub knows the other constructor, of no subclass
        self._rank = rank
        self._size = size
        self._name = ""
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        gloo._set_sequence_number_for_group()
        self._inner = dist.ProcessGroup(store, rank, size)
        for group in (self, self._inner):
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._exchange: LaggedAllToAll | None = None
        if size > 1:
            transport = open_lagged_transport(
                Opening(
                    PrefixStore("lag", store),
                    rank,
                    members,
                    LagWindow(bound).num_slots,
                    options,
                    timeout.total_seconds(),
                )
            )
            self._exchange = LaggedAllToAll(transport, bound)
            finalize(self, transport.close).atexit = False  # torch shuts down none but its own

    @property
    def lag(self) -> LaggedAllToAll | None:
        """The exchange of this group; none for one rank."""
        return self._exchange

    def all_to_all_single(  # type: ignore[override]  # its overloads differ in names of arguments
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: dist.AllToAllOptions | None = None,
        timeout: timedelta | None = None,
    ) -> dist.Work | None:
        """See :func:`torch.distributed.all_to_all_single`."""
        if not (input.is_contiguous() and output.is_contiguous()):
            raise ValueError("Tensors must be contiguous")
        if not (input.is_cpu and output.is_cpu):
            raise _refused("tensors on the CPU are needed")
        exchange = self._exchange
        if not (output_split_sizes or input_split_sizes):
            _check_equal(input, output, self._size)
            each = input.nbytes // self._size
            # torch 2.6 has no asyncOp
            is_waited_for = opts is not None and not getattr(opts, "asyncOp", True)
            if exchange is not None:
                source = input.data_ptr()
                target = output.data_ptr()
                with _span("bls:all_to_all"):
                    if is_waited_for and exchange.exchange(source, target, each):
                        return None
                    number = exchange.initiate_equal(source, target, each, output)
                if number is not None:
                    return LaggedWork(exchange, number, [output], [output])
        going = _consecutive(input, _bytes_of(input, input_split_sizes, self._size))
        coming = _consecutive(output, _bytes_of(output, output_split_sizes, self._size))
        return self._begin(going, coming, [output], [output])

    alltoall_base = all_to_all_single  # type: ignore[assignment]  # its name before torch 2.13

    def alltoall(  # type: ignore[override]  # its overloads differ in names of arguments
        self,
        output_tensors: list[Tensor],
        input_tensors: list[Tensor],
        opts: dist.AllToAllOptions | None = None,
    ) -> dist.Work:
        """See :func:`torch.distributed.all_to_all`."""
        for name, tensors in (("input", input_tensors), ("output", output_tensors)):
            if len(tensors) != self._size:
                raise _refused(
                    f"{name} tensor list size {len(tensors)} does not match world size {self._size}"
                )
            if not all(each.is_cpu for each in tensors):
                raise _refused("tensors on the CPU are needed")
        sent = [each.contiguous() for each in input_tensors]
        received = [
            each if each.is_contiguous() else torch.empty(each.shape, dtype=each.dtype)
            for each in output_tensors
        ]
        return self._begin(_scattered(sent), _scattered(received), output_tensors, received)

    def _begin(
        self, going: RankParts, coming: RankParts, outputs: list[Tensor], received: list[Tensor]
    ) -> LaggedWork:
        if going.sizes[self._rank] != coming.sizes[self._rank]:
            raise _refused(
                f"{going.sizes[self._rank]} bytes for this rank itself, which expects"
                f" {coming.sizes[self._rank]}"
            )
        if self._exchange is None:
            copy_bytes(int(coming.addresses[0]), int(going.addresses[0]), int(going.sizes[0]))
            return LaggedWork(None, 0, outputs, received)
        with _span("bls:all_to_all"):
            number = self._exchange.initiate(going, coming)
        return LaggedWork(self._exchange, number, outputs, received)

    # all that torch's PyProcessGroup looks for, under the names of torch 2.6 and 2.13
    allgather = _by_gloo("allgather")
    all_gather_single_coalesced = _by_gloo("all_gather_single_coalesced")
    allgather_into_tensor_coalesced = _by_gloo("allgather_into_tensor_coalesced")
    allreduce = _by_gloo("allreduce")
    allreduce_coalesced = _by_gloo("allreduce_coalesced")
    barrier = _by_gloo("barrier")
    broadcast = _by_gloo("broadcast")
    reduce_scatter = _by_gloo("reduce_scatter")
    reduce_scatter_single_coalesced = _by_gloo("reduce_scatter_single_coalesced")
    reduce_scatter_tensor_coalesced = _by_gloo("reduce_scatter_tensor_coalesced")
    send = _by_gloo("send")
    recv = _by_gloo("recv")

    def getBackendName(self) -> str:
        """As users chose it."""
        return NAME

    def shutdown(self) -> None:
        """Close the transport."""
        if self._exchange is not None:
            self._exchange.close()


def create(options: _DistributedBackendOptions, chosen: object) -> BoundedLagProcessGroup:
    """What torch.distributed calls for ``bls``; ``chosen`` is what a user gave as ``pg_options``.

    Raises:
        ConfigError: for options of another type.
    """
    if chosen is not None and not isinstance(chosen, BoundedLagOptions):
        raise ConfigError(
            f"pg_options of type {type(chosen).__name__} for the backend bls",
            "pibroch.BoundedLagOptions",
        )
    members = options.global_ranks_in_group or list(
        range(options.group_size or dist.get_world_size())
    )
    return BoundedLagProcessGroup(
        options.store, options.group_rank, members, options.timeout, chosen or BoundedLagOptions()
    )


def _span(name: str) -> AbstractContextManager[object]:
    """A part of the calling thread's time in torch's profiler; one comparison while none runs."""
    return record_function(name) if profiler._is_profiler_enabled else _NOTHING


def _refused(what: str) -> RuntimeError:
    """An error as gloo raises it: programs that catch torch's go on as they are."""
    return RuntimeError(f"ProcessGroupBLS: {what}")


def _check_equal(input: Tensor, output: Tensor, size: int) -> None:
    if input.nbytes != output.nbytes:
        raise _refused(
            f"{input.nbytes} bytes to send in equal parts, and {output.nbytes} to receive"
        )
    if input.ndim == 0 or len(input) % size or len(output) % size:
        raise RuntimeError("Tensor's dim 0 does not divide equally across group size")


def _bytes_of(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Bytes of each rank's rows."""
    num_rows = len(tensor) if tensor.ndim else 0
    if not splits:
        if num_rows % size:
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        splits = [num_rows // size] * size
    if len(splits) != size:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if sum(splits) != num_rows or min(splits) < 0:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")
    width = tensor.nbytes // max(1, num_rows)
    return [width * each for each in splits]


def _consecutive(tensor: Tensor, sizes: list[int]) -> RankParts:
    first = tensor.data_ptr()
    ends = list(accumulate(sizes, initial=first))
    return RankParts(np.array(ends[:-1], np.int64), np.array(sizes, np.int64), tensor)


def _scattered(tensors: Sequence[Tensor]) -> RankParts:
    addresses = np.array([each.data_ptr() for each in tensors], np.int64)
    return RankParts(addresses, np.array([each.nbytes for each in tensors], np.int64), tensors)
