"""What an attacker makes of real frames: something changed, cut off, repeated, or made up."""

import random

import msgspec

from pibroch.rpc.transport.frames import Kind, header
from pibroch.rpc.values.messages import Call, Envelope, encode

Ext = msgspec.msgpack.Ext


def call_of(function, *args, raw=None):
    """The metadata of a call; ``raw`` in place of the encoded ``[args, kwargs]``."""
    value = encode([list(args), {}]) if raw is None else raw
    return encode(Envelope(msgspec.Raw(encode(Call(function))), msgspec.Raw(value)))


def mutations(seeds, count, seed=0):
    """``count`` frames: noise, and real ones with something changed."""
    chance = random.Random(seed)
    for _ in range(count):
        frame = bytearray(chance.choice(seeds))
        yield bytes(_MUTATIONS[chance.randrange(len(_MUTATIONS))](frame, chance))


def _noise(frame, chance):
    return chance.randbytes(chance.randrange(1, 200))


def _flip(frame, chance):
    for _ in range(chance.randrange(1, 4)):
        frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
    return frame


def _flip_body(frame, chance):
    """Only behind the header, so that the connection survives it."""
    for _ in range(chance.randrange(1, 6)):
        if len(frame) > 24:
            frame[chance.randrange(24, len(frame))] = chance.randrange(256)
    return frame


def _shorten_metadata(frame, chance):
    """Cut off, with lengths that fit."""
    length = chance.randrange(max(1, len(frame) - 24))
    return (
        frame[:4] + length.to_bytes(4, "little") + frame[8:16] + bytes(8) + frame[24 : 24 + length]
    )


def _truncate(frame, chance):
    return frame[: chance.randrange(1, len(frame) + 1)]


def _other_kind(frame, chance):
    frame[3] = chance.randrange(16)
    return frame


def _other_length(frame, chance):
    at = chance.choice([4, 16])
    frame[at : at + 4] = chance.choice([0, 1, 255, 1 << 16, 1 << 20, (1 << 32) - 1]).to_bytes(
        4, "little"
    )
    return frame


def _other_number(frame, chance):
    frame[8:16] = chance.randbytes(8)
    return frame


def _metadata(metadata, chance, kind=None):
    return (
        header(
            kind or chance.choice([Kind.REQUEST, Kind.NOTE, Kind.ANSWER]),
            chance.randrange(100),
            len(metadata),
            0,
        )
        + metadata
    )


def _other_tensors(frame, chance):
    """A good call whose tensors are described wrongly."""
    sizes = [0, 1, 7, 2**31, 2**62, 2**63, 2**64 - 1, -1]
    infos = [
        [
            chance.choice([0, 3, 9, 16, 17, 99, -1]),
            [chance.choice(sizes) for _ in range(chance.randrange(4))],
            *chance.choice(
                [
                    [],
                    [chance.randrange(3)],
                    [1, chance.choice(sizes)],
                    [1, 0, True],
                    [None, 0, False, 5],
                ]
            ),
        ]
        for _ in range(chance.randrange(1, 4))
    ]
    body = encode(Call("hostility:echo"))
    return _metadata(encode([msgspec.Raw(body), [[Ext(1, encode(0))], {}], infos]), chance)


def _deep(frame, chance):
    depth = chance.choice([50, 300, 5000])
    inner = chance.choice([b"\x91" * depth + b"\xc0", b"\x81\xa1a" * depth + b"\xc0"])
    return _metadata(
        call_of("hostility:echo", raw=b"\x92\x91" + inner + b"\x80"), chance, Kind.REQUEST
    )


def _many(frame, chance):
    """Counts in the metadata that are far too large."""
    lie = chance.choice(
        [
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
            b"\xc9\xff\xff\xff\xff\x02",
        ]
    )
    return _metadata(
        call_of("hostility:echo", raw=b"\x92\x91" + lie + b"\x80"), chance, Kind.REQUEST
    )


def _other_form(frame, chance):
    value = Ext(chance.randrange(-3, 40), chance.randbytes(chance.randrange(20)))
    return _metadata(call_of("hostility:echo", raw=encode([[value], {}])), chance, Kind.REQUEST)


_BODIES = str.split("""
    call answer arrived function method create fetch rrefbackward refs discover backward gradients
    abort release nothing
""")


def _other_body(frame, chance):
    body = encode(
        [
            chance.choice(_BODIES),
            *chance.choices([None, 1, "x", [], 2**63], k=chance.randrange(4)),
        ]
    )
    return _metadata(encode([msgspec.Raw(body), None]), chance)


def _other_name(frame, chance):
    names = [
        "os:system",
        "hostility:__private",
        "hostility:os.system",
        "torch:load",
        "hostility:missing",
        "",
        "::",
        "a" * 1000,
    ]
    return _metadata(call_of(chance.choice(names), "x"), chance, Kind.REQUEST)


def _repeat(frame, chance):
    return frame * chance.randrange(2, 4)


_MUTATIONS = [
    *(
        _noise,
        _flip,
        _truncate,
        _other_kind,
        _other_length,
    ),  # after most of these the stream is out of step
    *(_flip_body, _shorten_metadata, _other_number, _other_tensors, _other_tensors, _deep, _many)
    * 2,
    *(_other_form, _other_form, _other_body, _other_body, _other_name, _repeat) * 2,
]
