"""Models that are the same on all ranks are clipped by torch itself.

The rest is in tests/distributed/test_group_modules.py.
"""

import copy

import pytest
import torch
from torch import nn

from pibroch.collectives import Ranks, clip_grad_norm


@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_without_groups_it_is_torch_s_to_the_bit(max_norm):
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1), nn.Linear(2, 2))
    theirs = copy.deepcopy(ours)
    x = torch.randn(9, 7)
    norms = []
    channel = Ranks.alone().open_channel()
    for model, clip in ((ours, lambda m: clip_grad_norm(m, max_norm, channel)), (theirs, None)):
        model[:2](x).square().sum().backward()  # nothing reaches the third layer
        norms.append(
            clip(model) if clip else nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        )
    assert torch.equal(*norms)
    assert ours[2].weight.grad is None
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(ours[:2].parameters(), theirs[:2].parameters(), strict=True)
    )
