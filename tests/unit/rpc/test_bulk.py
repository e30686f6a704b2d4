import random

import msgspec
import pytest
import torch

from pibroch.errors import ProtocolError
from pibroch.rpc.transport.bulk import CHUNK_BYTES, BulkReceiver
from pibroch.rpc.transport.frames import Frame, Kind
from pibroch.rpc.values.messages import TensorInfo

SIZE = 2 * CHUNK_BYTES + 400


def chunk(number, total, offset, length):
    return Frame(Kind.BULK, number, msgspec.msgpack.encode((total, offset)), length)


def arrive(receiver, frame, data):
    (memory,) = receiver.allocate(frame)
    memory[:] = data
    return receiver.arrived(frame)


def chunks(number, data):
    for offset in range(0, len(data), CHUNK_BYTES):
        part = data[offset : offset + CHUNK_BYTES]
        yield chunk(number, len(data), offset, len(part)), part


def test_chunks_in_any_order_make_the_tensor():
    sent = torch.arange(SIZE // 4, dtype=torch.int32)
    data = sent.numpy().tobytes()
    receiver = BulkReceiver(1 << 30)
    parts = list(chunks(7, data))
    random.Random(1).shuffle(parts)
    assert [arrive(receiver, *part) for part in parts] == [False, False, True]
    assert receiver.is_complete(7)
    info = TensorInfo(7, (SIZE // 4,), transfer=7)
    assert torch.equal(receiver.take(info), sent)
    with pytest.raises(ProtocolError, match="two places"):
        receiver.take(info)


@pytest.mark.parametrize(
    "frame",
    [
        chunk(1, SIZE, 1, CHUNK_BYTES),  # between chunks
        chunk(1, SIZE, 0, CHUNK_BYTES - 1),  # a hole would stay
        chunk(1, SIZE, 2 * CHUNK_BYTES, 401),  # beyond the end
        chunk(1, SIZE, -CHUNK_BYTES, CHUNK_BYTES),
        chunk(1, 1 << 40, 0, CHUNK_BYTES),  # larger than allowed
        chunk(1, 0, 0, 0),
        Frame(Kind.BULK, 1, b"\xc1", 5),
        Frame(Kind.REQUEST, 1, b"", 5),
    ],
)
def test_chunks_that_do_not_fit_are_refused(frame):
    receiver = BulkReceiver(1 << 30)
    arrive(receiver, *next(chunks(2, bytes(SIZE))))
    with pytest.raises(ProtocolError):
        receiver.allocate(frame)


def test_a_chunk_comes_once_and_its_transfer_keeps_its_size():
    receiver = BulkReceiver(1 << 30)
    receiver.allocate(chunk(1, SIZE, 0, CHUNK_BYTES))
    for again in (chunk(1, SIZE, 0, CHUNK_BYTES), chunk(1, SIZE - 400, CHUNK_BYTES, CHUNK_BYTES)):
        with pytest.raises(ProtocolError):
            receiver.allocate(again)


def test_transfers_that_no_message_names_count_against_the_limit():
    receiver = BulkReceiver(3 * SIZE)
    for number in range(3):
        for part in chunks(number, bytes(SIZE)):
            arrive(receiver, *part)
    with pytest.raises(ProtocolError, match="under way"):
        receiver.allocate(chunk(3, SIZE, 0, CHUNK_BYTES))
    receiver.take(TensorInfo(4, (SIZE,), transfer=0))
    receiver.allocate(chunk(3, SIZE, 0, CHUNK_BYTES))


def test_a_transfer_of_another_size_than_its_tensor():
    receiver = BulkReceiver(1 << 30)
    for part in chunks(1, bytes(SIZE)):
        arrive(receiver, *part)
    with pytest.raises(ProtocolError, match="as its shape says"):
        receiver.take(TensorInfo(4, (SIZE + 1,), transfer=1))
