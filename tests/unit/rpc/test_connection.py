"""What a message may say of its tensors."""

import gc
from types import SimpleNamespace

import pytest
import torch

from pibroch.rpc.calls.requests import Requests
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.options import Limits
from pibroch.rpc.transport.connection import Connection
from pibroch.rpc.transport.frames import Frame, Kind
from pibroch.rpc.values.messages import Answer, Envelope, TensorInfo, encode

LIMITS = Limits(message_bytes=3000)
DEAF = SimpleNamespace(**dict.fromkeys(("on_message", "on_failure", "on_lost"), lambda *_: None))


def arrived(*infos):
    """The tensors of an answer, or the text of its error."""
    messages = []
    failures = []
    inbox = SimpleNamespace(
        on_message=lambda connection, message: messages.append(message.tensors),
        on_failure=lambda connection, number, metadata: failures.append(str(metadata)),
        on_lost=lambda connection, reason: None,
    )
    connection = Connection(WorkerInfo("eve", 1), 1, LIMITS, inbox)
    metadata = encode(Envelope(encode(Answer()), encode(None), list(infos)))
    num_bytes = sum(info.num_bytes() for info in infos)
    connection.on_frame(Frame(Kind.ANSWER, 3, metadata, num_bytes, payload=bytearray(num_bytes)))
    (outcome,) = messages or failures
    return outcome


@pytest.mark.parametrize("num_tensors", [1, 4])
def test_room_between_rows_counts_as_memory(num_tensors):
    """Places in shared memory may be named many times, so what is made of them must be counted."""
    outcome = arrived(*[TensorInfo(0, (10, 10), layout=((0, 1), (20, 1)))] * num_tensors)
    if num_tensors == 1:
        assert outcome[0].stride() == (20, 1) and torch.equal(outcome[0], torch.zeros(10, 10))
    else:
        assert "room between their rows" in outcome


def test_orders_of_dims_take_no_memory():
    assert len(arrived(*[TensorInfo(0, (10, 10), layout=((1, 0), ()))] * 4)) == 4


def test_a_lost_connection_keeps_nothing_of_what_has_half_arrived():
    """It may live until the garbage collector runs, and a peer may connect often before."""
    connection = Connection(WorkerInfo("eve", 1), 1, LIMITS, DEAF)
    connection.open_further(NoStream(), b"", is_bulk=True)
    chunk = Frame(Kind.BULK, 1, encode((2911, 0)), 2911)
    connection.allocate_chunk(chunk)
    assert num_tensors_of(2911) > 0
    connection.lose("it was enough")
    assert num_tensors_of(2911) == 0


class NoStream:
    """Where no bytes travel."""

    def start(self, surplus):
        pass

    def close(self, reason):
        pass


def num_tensors_of(size):
    return sum(type(each) is torch.Tensor and each.numel() == size for each in gc.get_objects())


def test_a_request_that_meets_a_lost_connection_says_why_it_was_lost():
    connection = Connection(WorkerInfo("eve", 1), 1, LIMITS, DEAF)
    failures = []
    connection.lose("it does not listen")
    loop = SimpleNamespace(call_at=lambda *_: None)
    requests = Requests(WorkerInfo("me", 0), loop, None)
    requests.expect(connection, SimpleNamespace(fail=failures.append), 10.0)
    assert ["it does not listen" in str(error) for error in failures] == [True]
    assert requests.num_pending == 0
