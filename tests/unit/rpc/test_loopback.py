"""A worker's messages to itself."""

from types import SimpleNamespace

import torch

from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.options import Limits
from pibroch.rpc.transport.frames import Kind
from pibroch.rpc.transport.loopback import Loopback
from pibroch.rpc.values.messages import Answer, Envelope, encode


def test_tensors_are_handed_over_and_only_answers_at_once():
    messages = []
    failures = []
    soon = []
    inbox = SimpleNamespace(
        on_message=lambda connection, message: messages.append((connection, message)),
        on_failure=lambda connection, number, metadata: failures.append((number, metadata)),
        on_lost=lambda *_: None,
    )
    loopback = Loopback(
        WorkerInfo("me", 0), 7, Limits(requests=1), inbox, SimpleNamespace(call_soon=soon.append)
    )
    tensor = torch.ones(3)
    infos, payload = loopback.place([tensor], {})
    metadata = encode(Envelope(encode(Answer()), encode(None), infos))
    loopback.send(Kind.ANSWER, 1, metadata, payload)
    loopback.send(Kind.REQUEST, 2, metadata, payload)
    ((connection, answer),) = messages
    assert connection is loopback and answer.tensors[0] is tensor and not soon[1:]
    soon[0]()
    assert [(message.kind, message.number) for _, message in messages] == [
        (Kind.ANSWER, 1),
        (Kind.REQUEST, 2),
    ]
    loopback.send_failure(3, b"why")
    assert failures == [(3, b"why")]
    assert (loopback.bytes_owed, loopback.only_stream, loopback.is_lost) == (0, None, False)
