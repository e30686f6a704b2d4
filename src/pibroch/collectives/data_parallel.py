"""Dense layers over ranks: one model, and gradients of the mean loss over the global batch.

torch's DistributedDataParallel gives each rank the same weight, however many samples it has,
renames the parameters, and hangs or stops where a rank has no samples. What is here weights ranks
by their samples and keeps names. Gradients are clipped by their norm over all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from pibroch.collectives import ownership
from pibroch.collectives.gradients import GradientReducer
from pibroch.collectives.ranks import Channel, Ranks
from pibroch.collectives.rounding import warn_of_other_rounding
from pibroch.collectives.samples import samples_of
from pibroch.errors import ConfigError
from pibroch.models.batch_norm import BatchNorm

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=nn.Module)
Reduction = Literal["mean", "sum"]

_CALLS: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()
"""Models, each with the hook of its calls."""
_SUMMED = WeakTensorKeyDictionary()
"""Parameters whose gradients are summed, each with its hooks."""


def data_parallel(
    model: M,
    ranks: Ranks | None = None,
    reduction: Reduction = "mean",
    num_samples: Callable[..., int] | None = None,
) -> M:
    """Make ``model`` one model of all ranks; returns it, with hooks attached and nothing renamed.

    Parameters and buffers become those of rank 0, now. From then on each backward leaves in
    ``grad``, on all ranks the same bits, the mean over ranks weighted with the samples that each
    had in its forward pass: with a loss that is the mean over a rank's own samples, the gradient of
    the mean over the global batch. Sums travel during backward, bucket by bucket from the last
    layer to the first, and are waited for at its end. :class:`pibroch.models.BatchNorm` takes its
    moments over all ranks. In one process nothing is done at all.

    Every rank calls the model and one backward through it in each step, with an empty batch too:
    ranks wait for each other. A rank without samples contributes nothing, be its gradients NaN. A
    parameter that no rank's backward reached keeps its ``grad``. Reentrant activation checkpointing
    is not supported.

    *Several passes*: gradients add up until they are cleared, as in one process, and each pass
    weighs by its own samples, in whatever order calls and backwards come. One backward through
    several calls needs one number of samples in all of them, on each rank; any other is refused on
    all ranks, and leaves ``grad`` as it was.

    *Layers that are trained later*, because they were frozen now or are added later: call this
    again, on all ranks, or the next call of the model is refused. Freezing some later is fine.

    *Processors of several kinds* round an optimizer's step differently: parameters then drift apart
    by their last bits, which the first rank logs once (:mod:`pibroch.collectives.rounding`).

    *Copies*, by `copy.deepcopy` or pickle, keep their gradients to themselves. Batch norms of deep
    copies still take moments over all ranks. A model that is dropped gives its connections back.

    *The number of samples* of a call is the first dimension of the first tensor among its
    arguments. A batch says its ``batch_size`` or, as TorchRec's ids do, its ``stride()``; of any
    other object or container it is what all tensors and batches in it agree on. ``num_samples``
    says it where that is not so.

    *A module that some ranks hold*: with a group as ``ranks`` (:meth:`Ranks.group`) the group's
    members call this for a module that they alone have, and all of the above is about them. Where
    the module is a part of a larger model, all ranks then call this for the model: it leaves the
    part alone. Parts of different groups have different names in the model.

    Args:
        model: the same on all ranks but for its numbers, and for parts that belong to groups.
        ranks: which processes; those of torch.distributed's default group when not given.
        reduction: ``"sum"`` where gradients are weighted already: they come out of an exchange
            whose backward delivers those of the mean over the global batch, and are only to be
            added. They count from every rank then, and must be numbers.
        num_samples: gives the samples of a call when called with its arguments, e.g. ``lambda
            batch: len(batch.labels)``.

    Raises:
        ConfigError: on all ranks, when their models differ in names, shapes or types; in a call of
            the model, when its arguments do not say how many samples there are, or it has layers to
            train that it had not.
        TrainingError: in a backward, for calls of several numbers of samples, or for layers used
            without a call of the model.
        RankFailedError: here and in each backward, when another rank failed or was lost.
    """
    ranks = Ranks.joined() if ranks is None else ranks
    if not ranks.are_all:
        ownership.assign(model, ranks.members)
    if ranks.world_size == 1:
        for parameter in () if ranks.are_all else model.parameters():
            _SUMMED[parameter] = []  # a part of one rank: nothing to sum
        return model
    channel = ranks.open_channel()
    warn_of_other_rounding(channel)
    parts = ownership.own_parts(model)
    ownership.note_parts(model, _check_same(channel, model, parts))
    _broadcast(channel, [tensor for _, tensor in _tensors(model, parts)])
    _share_moments(model, ranks, parts, is_mean=reduction == "mean")
    gradients = GradientReducer(channel, _own_parameters(model, parts), reduction == "mean")
    for parameter, hooks in gradients.hooks():
        for hook in _SUMMED.get(parameter, ()):  # of an earlier call, or of another model's
            hook.remove()
        _SUMMED[parameter] = hooks
    if model in _CALLS:
        _CALLS[model].remove()
    calls = _Calls(gradients, samples_of if num_samples is None else num_samples)
    _CALLS[model] = model.register_forward_hook(calls, with_kwargs=True)
    return model


def clip_grad_norm(model: nn.Module, max_norm: float, channel: Channel) -> Tensor:
    """Scale a model's gradients down so that all of them have a norm of at most ``max_norm``.

    As `torch.nn.utils.clip_grad_norm_`, to the bit, for a model that is the same on all ranks, and
    then nothing is sent. Of a model with parts that belong to groups of ranks
    (:func:`data_parallel`), each part counts once, wherever it is, and all ranks use the
    same norm.

    Args:
        model: after :func:`data_parallel` and backward.
        max_norm: bound.
        channel: between all ranks, each of which calls this. Blocks.

    Returns:
        The norm before.
    """
    parts = ownership.all_parts(model)
    here = channel.ranks.rank_in_run
    if not parts:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    led = [part for part, members in parts.items() if min(members) == here]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    shared = torch.nn.utils.get_total_norm(
        [g for name, g in gradients.items() if not ownership.is_within(name, parts)]
    )
    own = torch.nn.utils.get_total_norm(
        [g for name, g in gradients.items() if ownership.is_within(name, led)]
    )
    norm: Tensor = torch.linalg.vector_norm(
        torch.cat([shared.cpu().view(1), *channel.gather_tensors(own.cpu().view(1))])
    )
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


class _Calls:
    """A hook that looks at each call of a model in training.

    In a copy of the model it does nothing.
    """

    def __init__(self, gradients: GradientReducer | None, num_samples: Callable[..., int]) -> None:
        self._gradients = gradients
        self._num_samples = num_samples

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: object
    ) -> None:
        if self._gradients is None or not torch.is_grad_enabled():
            return
        _check_trained(model)
        if self._gradients.is_mean:
            self._gradients.count(int(self._num_samples(*args, **kwargs)), outputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Calls, (None, samples_of)


def _check_trained(model: nn.Module) -> None:
    if all(p in _SUMMED for p in model.parameters() if _learns(p)):
        return
    names = [name for name, p in model.named_parameters() if _learns(p) and p not in _SUMMED]
    raise ConfigError(
        "layers that require gradients and were frozen or absent when data_parallel was called: "
        f"{names[:3]}{f' and {len(names) - 3} more' if len(names) > 3 else ''}",
        "gradients of all ranks for each",
        "call pb.data_parallel(model) again, on every rank, once layers were thawed or added",
    )


def _learns(parameter: nn.Parameter) -> bool:
    """Whether it gets gradients; one without elements, as embedding tables have, gets none."""
    return parameter.requires_grad and parameter.numel() > 0


def _own_parameters(model: nn.Module, parts: Iterable[str]) -> list[nn.Parameter]:
    """Parameters of a model to be trained now.

    Those of parts that groups hold, or that are data-parallel themselves, are left out.
    """
    others = {
        parameter
        for module in model.modules()
        if module is not model and module in _CALLS
        for parameter in module.parameters()
    }
    return [
        p
        for name, p in model.named_parameters()
        if _learns(p) and p not in others and not ownership.is_within(name, parts)
    ]


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
    by_rank: list[Mapping[str, str | list[int]]] = channel.gather({**shapes, **parts})
    held = {
        name: tuple(there)
        for other in by_rank
        for name, there in other.items()
        if not isinstance(there, str)
    }
    for rank, other in enumerate(by_rank):
        for name in sorted(by_rank[0].keys() | other.keys() | held.keys()):
            here = by_rank[0].get(name, "absent")
            there = other.get(name, "absent")
            members = held.get(name)
            if members is None and here != there:
                raise ConfigError(
                    f"{name}, on rank 0 {here} and on rank {rank} {there}", "one model on all ranks"
                )
            if members is not None and there != (
                [*members] if channel.ranks.members[rank] in members else "absent"
            ):
                raise ConfigError(
                    f"{name}, which belongs to ranks {[*members]}, on rank {rank}: {there}",
                    "each part of a model on its group's ranks alone",
                    "give parts of different groups different names",
                )
    return held


def _broadcast(channel: Channel, tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's numbers, bit for bit, to all ranks."""
    with torch.no_grad():
        chosen = [tensor for tensor in tensors if tensor.numel()]
        flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in chosen]
        if not flat:
            return
        sizes = [len(part) for part in flat]
        size = channel.ranks.world_size
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
        gather = _Gather(ranks.open_channel())
        for norm in norms:
            norm.gradients_are_weighted = not is_mean
            norm.gather = gather
    if any(
        isinstance(module, _BatchNorm) and not isinstance(module, BatchNorm) for module in modules
    ):
        logger.warning(
            "torch's batch norm in the model takes the moments of each rank's own samples; "
            "pibroch.models.BatchNorm takes those of the global batch"
        )


class _Gather:
    """Moments of all ranks.

    Deep copies of a model share it, so that they do; pickles leave it out.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __call__(self, moments: Tensor) -> Tensor:
        size = self._channel.ranks.world_size
        ones = [1] * size
        return self._channel.all_to_all(moments.expand(size, -1).contiguous(), ones, ones)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gather:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
