"""The examples and tables of the document that describes the wire format, against the code."""

import re
from pathlib import Path

import msgspec
import pytest
import torch

from pibroch.rpc.options import Limits
from pibroch.rpc.transport.frames import FrameReader, Kind, header
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.codec import Code, Codec
from pibroch.rpc.values.messages import (
    CODE_OF_DTYPE,
    Call,
    Envelope,
    TensorInfo,
    decode_envelope,
    encode,
)
from pibroch.wire.handshake import Client, Server
from pibroch.wire.handshake_messages import Identity, Purpose

DOCUMENT = (Path(__file__).parents[3] / "docs/wire-format.md").read_text()
CODEC = Codec(Callables(()))


def example(name):
    """The bytes of an example: pairs of hexadecimal digits up to the comment on each line."""
    lines = re.search(rf"<!-- bytes: {name} -->\n```\w*\n(.*?)```", DOCUMENT, re.DOTALL)[
        1
    ].splitlines()
    return bytes.fromhex(" ".join(line[:51] for line in lines))


def test_the_handshake():
    secret = b"an example secret, not a real one"
    client = Client(secret, Identity("ann", 1, 2), "ben", Purpose(4, 0), nonce=bytes(range(32, 64)))
    server = Server(secret, Identity("ben", 0, 3), nonce=bytes(range(32)))
    assert server.start() == example("hello")
    assert client.receive(example("hello")) == example("client")
    assert server.receive(example("client")) == example("server")
    client.receive(example("server"))
    assert client.done and server.done


def test_the_request_is_what_is_sent():
    raw, tensors, _ = CODEC.encode([[torch.tensor([1.0, 2.0]), 1], {}])
    metadata = encode(Envelope(msgspec.Raw(encode(Call("torch:add"))), raw, [TensorInfo(0, (2,))]))
    payload = tensors[0].numpy().tobytes()
    assert header(Kind.REQUEST, 7, len(metadata), len(payload)) + metadata + payload == example(
        "request"
    )


def test_the_request_is_understood():
    reader = FrameReader(1 << 10, 1 << 10, lambda frame: [])
    data = example("request")
    reader.buffer()[: len(data)] = data
    (frame,) = reader.received(len(data))
    envelope = decode_envelope(frame.metadata)
    (tensor, one), _ = CODEC.decode(
        envelope.value, [torch.frombuffer(frame.payload, dtype=torch.float32)]
    )
    assert (frame.kind, frame.number, one) == (Kind.REQUEST, 7, 1) and tensor.tolist() == [1.0, 2.0]


def test_the_data_types():
    listed = re.search(r"Codes of `dtype`: (.*?)\.\n", DOCUMENT, re.DOTALL)[1]
    listed = " ".join(listed.split()).split(", ")
    assert listed == [
        f"{code} {str(dtype).removeprefix('torch.')}" for dtype, code in CODE_OF_DTYPE.items()
    ]


def test_the_kinds_of_frames():
    rows = re.findall(r"^\| (\d+) \| (\w+) \| .*\|.*\|.*\|$", DOCUMENT, re.MULTILINE)
    assert {
        (int(number), name.upper()) for number, name in rows if name.upper() in Kind.__members__
    } == {(kind.value, kind.name) for kind in Kind}


def test_the_forms_of_values():
    table = DOCUMENT.partition("## Values")[2].partition("**Names.**")[0]
    codes = {
        int(code)
        for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
        for code in row.split(",")
    }
    assert codes == {code for name, code in vars(Code).items() if name.isupper()}


def test_the_bodies():
    import pibroch.rpc.autograd.messages as autograd
    import pibroch.rpc.calls.departure as departure
    import pibroch.rpc.references.call_messages as rref
    import pibroch.rpc.values.messages as messages
    from pibroch.rpc.references import messages as references

    modules = (messages, references, rref, autograd, departure)
    structs = [
        item
        for module in modules
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, msgspec.Struct)
    ]
    tags = {item.__struct_config__.tag for item in structs} - {None}
    missing = {tag for tag in tags if f"`{tag}`" not in DOCUMENT and f'["{tag}"' not in DOCUMENT}
    assert not missing


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16 MiB", Limits().metadata_bytes >> 20),
        ("16 GiB", Limits().message_bytes >> 30),
        ("64 for each", Limits().waiting_strangers),
        ("10 s", Limits().handshake_s),
    ],
)
def test_the_limits(text, value):
    assert re.search(rf"\| {text}", DOCUMENT) and float(text.split()[0]) == value
