"""pibroch.rpc in topic ``rpc``."""

from __future__ import annotations

import os

import torch

from benchmarks.cases import Case
from benchmarks.latency_policies import SWITCHED_OFF
from benchmarks.workers.rpc_subject import CALLEE, CALLER, RpcSubject
from pibroch import rpc
from pibroch.rpc import autograd
from pibroch.version import __version__

WITHOUT = "RPC_WITHOUT_POLICY"
"""Variable that names a latency policy to switch off in this worker."""


def build(case: Case) -> RpcSubject:
    """Join as the rank that the environment tells."""
    rank = int(os.environ["RANK"])
    if without := os.environ.get(WITHOUT):
        setattr(*SWITCHED_OFF[without])
    options = rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=300, allowed_modules=["benchmarks.workers"]
    )
    rpc.init_rpc((CALLEE, CALLER)[rank], rank=rank, world_size=2, rpc_backend_options=options)
    return RpcSubject(rpc, autograd, {"pibroch": __version__, "torch": torch.__version__})
