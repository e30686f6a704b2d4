"""Which RPC a process of topic ``rpc_cases`` speaks.

Pibroch's or torch's, which have the same names.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

VARIABLE = "RPC_CASES_LIBRARY"
PIBROCH = "pibroch"
TORCH = "torch.distributed"
"""Packages with ``rpc``."""
_PACKAGE = os.environ.get(VARIABLE, PIBROCH)

rpc: Any = importlib.import_module(f"{_PACKAGE}.rpc")
autograd: Any = importlib.import_module(
    "pibroch.rpc.autograd" if _PACKAGE == PIBROCH else "torch.distributed.autograd"
)
DistributedOptimizer: Any = importlib.import_module(
    "pibroch.rpc.optim" if _PACKAGE == PIBROCH else "torch.distributed.optim"
).DistributedOptimizer
