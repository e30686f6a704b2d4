"""The identity example with gRPC: what its user writes. Run once with RANK=0 and once with RANK=1.

No protobuf and no pickle: a tensor is a short header and its memory, joined in one copy; the
receiver uses the bytes that gRPC hands it as they are.
"""

import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch

DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def header(tensor: torch.Tensor) -> bytes:
    return struct.pack(
        f"<2q{tensor.dim()}q", DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape
    )


def memory(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def read_header(message: bytes) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, dims = struct.unpack_from("<2q", message)
    return DTYPES[dtype], struct.unpack_from(f"<{dims}q", message, 16)


def pack(tensor: torch.Tensor) -> bytes:
    return b"".join((header(tensor), memory(tensor)))


def unpack(message: bytes) -> torch.Tensor:
    dtype, shape = read_header(message)
    return torch.frombuffer(message, dtype=dtype, offset=16 + 8 * len(shape)).view(shape)


def identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


done = threading.Event()


def finish(message: bytes, _: object) -> bytes:
    done.set()
    return message


if __name__ == "__main__":
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if os.environ["RANK"] == "0":
        server = grpc.server(ThreadPoolExecutor(16), options=OPTIONS)
        handlers = {
            "identity": grpc.unary_unary_rpc_method_handler(
                lambda message, _: pack(identity(unpack(message)))
            ),
            "finish": grpc.unary_unary_rpc_method_handler(finish),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("Tensors", handlers),)
        )
        server.add_insecure_port(address)
        server.start()
        done.wait(60)
        server.stop(grace=1).wait(5)
    else:
        with grpc.insecure_channel(address, options=OPTIONS) as channel:
            argument = torch.rand(1000, 1000)
            answer = channel.unary_unary("/Tensors/identity")(
                pack(argument), timeout=60, wait_for_ready=True
            )
            assert torch.equal(unpack(answer), argument)
            channel.unary_unary("/Tensors/finish")(b"", timeout=60)
