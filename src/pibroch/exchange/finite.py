"""Whether gradients are finite: looked at in each step, before a row moves by them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pibroch.errors import NonFiniteGradientError
from pibroch.exchange.output import JaggedEmbeddings


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all numbers are; costs a sum, in which NaN and infinities stay.

    Finite numbers may have an infinite sum, and are looked at one by one.

    >>> are_finite([torch.tensor([3e38, 3e38]), torch.zeros(2)])
    True
    >>> are_finite([torch.zeros(2), torch.tensor([torch.inf, -torch.inf])])
    False
    """
    return all(
        math.isfinite(each.sum().item()) or bool(torch.isfinite(each).all()) for each in tensors
    )


def not_finite(
    gradients: Mapping[str, Tensor | JaggedEmbeddings], step: int
) -> NonFiniteGradientError:
    """The error for gradients of which some are not finite.

    Args:
        gradients: by feature.
        step: that they are of.
    """
    samples = {name: _first_bad_sample(each) for name, each in gradients.items()}
    bad = {name: sample for name, sample in samples.items() if sample is not None}
    name, sample = next(iter(bad.items()), ("", 0))
    more = f" and of {len(bad) - 1} more features" if len(bad) > 1 else ""
    return NonFiniteGradientError(
        f"gradients that are not finite in step {step}: of the embeddings of {name!r}, first in"
        f" sample {sample} of those looked up here{more}",
        "finite gradients; no row has moved",
        "look at labels and dense features, and at the loss for roots, powers, logarithms and"
        " divisions at 0: torch.autograd.set_detect_anomaly(True) names the operation",
    )


def _first_bad_sample(gradient: Tensor | JaggedEmbeddings) -> int | None:
    vectors = gradient if isinstance(gradient, Tensor) else gradient.values
    places = (~torch.isfinite(vectors).all(1)).nonzero()
    if not len(places):
        return None
    place = int(places[0])
    if isinstance(gradient, Tensor):
        return place
    return int(torch.searchsorted(gradient.offsets, place, right=True)) - 1
