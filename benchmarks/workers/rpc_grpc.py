"""gRPC in topic ``rpc``: raw bytes, no protobuf, a Unix socket on one host.

Tensors up to ``UNARY_BYTES`` travel as one message, with the packing of ``rpc_identity_grpc.py``.
Larger ones as a stream of chunks, which the receiver copies into the tensor as they come: found to
be nearly twice as fast at 4 MB, more than twice at 40 MB. Frames are as large as HTTP/2 allows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.workers import rpc_functions
from benchmarks.workers.rpc_identity_grpc import OPTIONS, header, memory, pack, read_header, unpack
from benchmarks.workers.rpc_subject import FUNCTIONS as NAMES
from benchmarks.workers.rpc_subject import CallSubject

UNARY_BYTES = 1 << 20
CHUNK_BYTES = 1 << 20
LARGE_FRAMES = [
    *OPTIONS,
    ("grpc.http2.max_frame_size", (16 << 20) - 1),
    ("grpc.http2.lookahead_bytes", 64 << 20),
]
FUNCTIONS = tuple(getattr(rpc_functions, name) for name in NAMES)
JOIN_TIMEOUT_S = 60
CALL_TIMEOUT_S = 300


class GrpcSubject(CallSubject):
    """The caller's side; the callee's serves as long as its process lives."""

    def __init__(self, address: str, is_callee: bool) -> None:
        self._server = start_server(address) if is_callee else None
        self._channel = grpc.insecure_channel(address, options=LARGE_FRAMES)
        self._whole = {
            f.__name__: self._channel.unary_unary(f"/whole/{f.__name__}") for f in FUNCTIONS
        }
        self._chunks = {
            f.__name__: self._channel.stream_stream(f"/chunks/{f.__name__}") for f in FUNCTIONS
        }
        grpc.channel_ready_future(self._channel).result(JOIN_TIMEOUT_S)

    def start(self, function: str, tensor: Tensor) -> Callable[[], Tensor]:
        """See :class:`CallSubject`."""
        if tensor.nbytes <= UNARY_BYTES:
            future = self._whole[function].future(pack(tensor), timeout=CALL_TIMEOUT_S)
            return lambda: unpack(future.result())
        chunks = self._chunks[function](pack_chunks(tensor), timeout=CALL_TIMEOUT_S)
        return lambda: unpack_chunks(chunks)

    def finish(self, started: Callable[[], Tensor]) -> Tensor:
        """See :class:`CallSubject`."""
        return started()

    def call(self, function: str, tensor: Tensor) -> Tensor:
        """See :class:`CallSubject`; a plain call is quicker than a future."""
        if tensor.nbytes <= UNARY_BYTES:
            return unpack(self._whole[function](pack(tensor), timeout=CALL_TIMEOUT_S))
        return self.start(function, tensor)()

    def versions(self) -> dict[str, str]:
        """See :class:`CallSubject`."""
        return {"grpcio": grpc.__version__}


def build(case: Case) -> GrpcSubject:
    """Serve as rank 0, call as rank 1."""
    host = os.environ["MASTER_ADDR"]
    port = os.environ["MASTER_PORT"]
    local = host.startswith("127.")
    address = f"unix-abstract:pibroch-bench-{port}" if local else f"{host}:{port}"
    return GrpcSubject(address, is_callee=os.environ["RANK"] == "0")


def start_server(address: str) -> grpc.Server:
    """Serve the functions both ways."""
    server = grpc.server(ThreadPoolExecutor(16), options=LARGE_FRAMES)
    whole = {f.__name__: grpc.unary_unary_rpc_method_handler(on_whole(f)) for f in FUNCTIONS}
    chunks = {f.__name__: grpc.stream_stream_rpc_method_handler(on_chunks(f)) for f in FUNCTIONS}
    for service, handlers in (("whole", whole), ("chunks", chunks)):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(address)
    server.start()
    return server


def on_whole(function: Callable[[Tensor], Tensor]) -> Callable[[bytes, Any], bytes]:
    """A handler of calls with one message each way."""
    return lambda message, _: pack(function(unpack(message)))


def on_chunks(
    function: Callable[[Tensor], Tensor],
) -> Callable[[Iterator[bytes], Any], Iterator[bytes]]:
    """A handler of calls with a stream each way."""
    return lambda messages, _: pack_chunks(function(unpack_chunks(messages)))


def pack_chunks(tensor: Tensor) -> Iterator[bytes]:
    """The header, then the tensor's memory."""
    yield header(tensor)
    whole = memory(tensor)
    for at in range(0, len(whole), CHUNK_BYTES):
        yield bytes(whole[at : at + CHUNK_BYTES])


def unpack_chunks(messages: Iterator[bytes]) -> Tensor:
    """Copy the chunks into a tensor as they come."""
    dtype, shape = read_header(next(messages))
    tensor = torch.empty(shape, dtype=dtype)
    whole = memory(tensor)
    at = 0
    for message in messages:
        whole[at : at + len(message)] = message
        at += len(message)
    return tensor
