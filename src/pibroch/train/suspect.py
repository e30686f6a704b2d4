"""Which sample of a step to look at when its loss is none."""

from __future__ import annotations

import torch
from torch import Tensor

from pibroch.data import JaggedBatch


def suspect(batch: JaggedBatch, logits: Tensor) -> tuple[int, str]:
    """The number of a sample in its batch, and what is odd about it.

    Where all logits are none, statistics of the batch may have carried one's number to the others,
    or the weights are none themselves: then it is the sample with the largest number.

    Args:
        batch: of which the loss is, with samples.
        logits: ``[N]`` or ``[N, T]``, of its samples; others, of pairs, are not looked at.
    """
    size = batch.batch_size
    if len(logits) != size:
        logits = torch.full((size,), torch.nan)
    of_samples = logits.detach().cpu().reshape(size, -1)
    is_none = ~torch.isfinite(of_samples).all(1)
    if is_none.any() and not is_none.all():
        number = int(is_none.nonzero()[0])
        return number, f"one of {int(is_none.sum())} of {size} whose logits are not finite"
    columns = [batch.dense, batch.labels.reshape(size, -1)]
    if not is_none.any():
        columns.append(of_samples)
    numbers = torch.cat([each.double().cpu() for each in columns], 1).abs()
    largest = numbers.nan_to_num(nan=torch.inf, posinf=torch.inf).amax(1)
    number = int(largest.argmax())
    return number, f"which has the largest number, {float(largest[number]):.3g}"
