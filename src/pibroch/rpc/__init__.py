"""Tensor RPC: remote calls, remote references, distributed autograd.

The names are those of ``torch.distributed.rpc``. See docs/rpc.md, and for the design
docs/design/0003-tensor-rpc.md.
"""

from pibroch.rpc import autograd, functions
from pibroch.rpc.api import (
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_available,
    rpc_async,
    rpc_sync,
    shutdown,
)
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.options import BackendType, Limits, RpcBackendOptions, TensorPipeRpcBackendOptions
from pibroch.rpc.remote_module import RemoteModule
from pibroch.rpc.rref import RRef, remote

__all__ = [
    "BackendType",
    "Limits",
    "RRef",
    "RemoteModule",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "autograd",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
