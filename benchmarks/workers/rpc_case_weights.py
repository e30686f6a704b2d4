"""Starting weights of topic ``rpc_cases``.

The same in every process, whatever other threads of it draw meanwhile.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def seeded(module: M, seed: int) -> M:
    """The module with drawn matrices and with biases of 0.

    Matrices are uniform in ±1/sqrt(their last dimension), scales of norms stay.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                bound = parameter[0].numel() ** -0.5
                parameter.uniform_(-bound, bound, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
    return module
