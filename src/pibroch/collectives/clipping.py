"""Clipping of gradients by their norm, over all ranks of a run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pibroch.collectives.ownership import all_parts, is_within
from pibroch.collectives.ranks import Channel


def clip_grad_norm(model: nn.Module, max_norm: float, channel: Channel) -> Tensor:
    """Scale a model's gradients down so that all of them have a norm of at most ``max_norm``.

    As `torch.nn.utils.clip_grad_norm_`, to the bit, for a model that is the same on all ranks, and
    then nothing is sent. Of a model with parts that belong to groups of ranks
    (:func:`pibroch.data_parallel`), each part counts once, wherever it is, and all ranks use the
    same norm.

    Args:
        model: after :func:`pibroch.data_parallel` and backward.
        max_norm: bound.
        channel: between all ranks, each of which calls this. Blocks.

    Returns:
        The norm before.
    """
    parts = all_parts(model)
    here = channel.ranks.rank_in_run
    if not parts:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    led = [part for part, members in parts.items() if min(members) == here]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    shared = torch.nn.utils.get_total_norm(
        [g for name, g in gradients.items() if not is_within(name, parts)]
    )
    own = torch.nn.utils.get_total_norm(
        [g for name, g in gradients.items() if is_within(name, led)]
    )
    norm: Tensor = torch.linalg.vector_norm(
        torch.cat([shared.cpu().view(1), *channel.gather_tensors(own.cpu().view(1))])
    )
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
