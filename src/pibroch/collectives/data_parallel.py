"""Dense layers over ranks: one model, and gradients of the mean loss over the global batch.

torch's DistributedDataParallel gives each rank the same weight, however many samples it has, renames the parameters, and
hangs or stops where a rank has no samples. What is here weights ranks by their samples and keeps names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pibroch.collectives import ownership
from pibroch.collectives.channel import Channel
from pibroch.collectives.gradients import GradientReducer
from pibroch.collectives.ranks import Ranks
from pibroch.collectives.samples import samples_of
from pibroch.errors import ConfigError
from pibroch.models.batch_norm import BatchNorm

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=nn.Module)
Reduction = Literal["mean", "sum"]


def data_parallel(
    model: M,
    ranks: Ranks | None = None,
    reduction: Reduction = "mean",
    num_samples: Callable[..., int] | None = None,
) -> M:
    """Make ``model`` one model of all ranks; returns it, with hooks attached and nothing renamed.

    Parameters and buffers become those of rank 0, now. From then on each backward leaves in ``grad``, on all ranks the same
    bits, the mean over ranks weighted with the samples that each had in its forward pass: with a loss that is the mean over
    a rank's own samples, the gradient of the mean over the global batch. Sums travel during backward, bucket by bucket from
    the last layer to the first, and are waited for at its end. :class:`pibroch.models.BatchNorm` takes its moments over all
    ranks. In one process nothing is done at all.

    Every rank calls the model and one backward through it in each step, with an empty batch too: ranks wait for each other.
    A rank without samples contributes nothing, be its gradients NaN. A parameter that no rank's backward reached keeps its
    ``grad``. Parameters to be trained must require gradients now; freezing some later is fine. Reentrant activation
    checkpointing is not supported.

    *The number of samples* of a call is the first dimension of the first tensor among its arguments. A batch says its
    ``batch_size`` or, as TorchRec's ids do, its ``stride()``; of any other object or container it is what all tensors and
    batches in it agree on. ``num_samples`` says it where that is not so.

    *A module that some ranks hold*: with a group as ``ranks`` (:meth:`Ranks.group`) the group's members call this for a
    module that they alone have, and all of the above is about them. Where the module is a part of a larger model, all ranks
    then call this for the model: it leaves the part alone. Parts of different groups have different names in the model.

    Args:
        model: the same on all ranks but for its numbers, and for parts that belong to groups.
        ranks: which processes; those of torch.distributed's default group when not given.
        reduction: ``"sum"`` where gradients are weighted already: they come out of an exchange whose backward delivers those
            of the mean over the global batch, and are only to be added. They count from every rank then, and must be numbers.
        num_samples: gives the samples of a call when called with its arguments, e.g. ``lambda batch: len(batch.labels)``.

    Raises:
        ConfigError: on all ranks, when their models differ in names, shapes or types; in a call of the model, when its
            arguments do not say how many samples there are.
        RankFailedError: here and in each backward, when another rank failed or was lost.
    """
    ranks = Ranks.joined() if ranks is None else ranks
    if not ranks.are_all:
        ownership.assign(model, ranks.members)
    if ranks.world_size == 1:
        return model
    channel, parts = ranks.open_channel(), ownership.own_parts(model)
    ownership.note_parts(model, _check_same(channel, model, parts))
    _broadcast(channel, [tensor for _, tensor in _tensors(model, parts)])
    _share_moments(model, ranks, parts, is_mean=reduction == "mean")
    parameters = [
        p
        for name, p in model.named_parameters()
        if p.requires_grad and not ownership.is_within(name, parts)
    ]
    counted = samples_of if num_samples is None else num_samples
    gradients = GradientReducer(channel, parameters, is_mean=reduction == "mean")
    if reduction == "mean":
        # lambdas: a deep copy of the model, for averages say, shares them and does not copy what they hold
        model.register_forward_pre_hook(
            lambda _, args, kwargs: gradients.count(counted, args, kwargs), with_kwargs=True
        )
    return model


def _tensors(model: nn.Module, parts: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, without those of parts."""
    for named in (model.named_parameters(), model.named_buffers()):
        yield from (
            (name, tensor) for name, tensor in named if not ownership.is_within(name, parts)
        )


def _check_same(channel: Channel, model: nn.Module, parts: ownership.Parts) -> ownership.Parts:
    """Returns the parts that groups hold on any rank."""
    shapes = {
        name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in _tensors(model, parts)
    }
    found: list[Mapping[str, str | list[int]]] = channel.gather({**shapes, **parts})
    held = {
        name: tuple(there)
        for other in found
        for name, there in other.items()
        if not isinstance(there, str)
    }
    for rank, other in enumerate(found):
        for name in sorted(found[0].keys() | other.keys() | held.keys()):
            here, there, members = (
                found[0].get(name, "absent"),
                other.get(name, "absent"),
                held.get(name),
            )
            if members is None and here != there:
                raise ConfigError(
                    f"{name}, on rank 0 {here} and on rank {rank} {there}", "one model on all ranks"
                )
            if members is not None and there != (
                [*members] if channel.ranks.members[rank] in members else "absent"
            ):
                raise ConfigError(
                    f"{name}, which belongs to ranks {[*members]}, on rank {rank}: {there}",
                    "each part of a model on its group's ranks alone", "give parts of different groups different names",
                )  # fmt: skip
    return held


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


def _share_moments(model: nn.Module, ranks: Ranks, parts: Iterable[str], is_mean: bool) -> None:
    modules = [
        module
        for name, module in model.named_modules()
        if not ownership.is_within(f"{name}.", parts)
    ]
    norms = [module for module in modules if isinstance(module, BatchNorm)]
    if norms:
        channel, ones = ranks.open_channel(), [1] * ranks.world_size
        for norm in norms:
            norm.gradients_are_weighted = not is_mean
            norm.gather = lambda vector: channel.all_to_all(
                vector.expand(ranks.world_size, -1).contiguous(), ones, ones
            )
    if any(
        isinstance(module, _BatchNorm) and not isinstance(module, BatchNorm) for module in modules
    ):
        logger.warning(
            "torch's batch norm in the model takes the moments of each rank's own samples; "
            "pibroch.models.BatchNorm takes those of the global batch"
        )
