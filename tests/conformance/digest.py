"""One line for the bits of twenty runs: exchanges, optimizers and ranks.

Two versions that print the same on processors of one kind train alike.

``PYTHONPATH=src:tests python tests/conformance/digest.py``; what it printed stands in design note
0009, by what kernels were compiled for, and the second line compares.
"""

import hashlib
import re
from pathlib import Path

import numpy as np

NOTE = Path(__file__).parents[2] / "docs/design/0009-a-door-for-every-exchange.md"

SIZES = [9, 4, 12, 0, 1, 30, 2, 8, 5, 0, 0, 6]
CACHES = ("lrpp", "partitioned", "replicated")
RUNS = [
    *(
        (1, name, "local", {})
        for name in ("sgd", "adagrad", "row_wise_adagrad", "adam", "row_wise_adam")
    ),
    *(
        (2 + number % 3, name, "alltoall", {"placement": placement})
        for number, (name, placement) in enumerate(
            [
                ("sgd", "row_wise"),
                ("adagrad", "table_wise"),
                ("row_wise_adagrad", "column_wise"),
                ("adam", "replicated"),
                ("row_wise_adam", "table_wise_pooled"),
                ("adam", {"a": "replicated", "b": "table_wise", "c": "column_wise"}),
            ]
        )
    ),
    (2, "adam", "alltoall", {"wire": "bfloat16", "compress": True}),
    *(
        (
            2 + number % 3,
            name,
            "lookahead",
            {"lookahead": (1, 2, 7, 200)[number % 4], "cache": CACHES[number % 3]},
        )
        for number, name in enumerate(
            ("sgd", "adagrad", "row_wise_adagrad", "adam", "row_wise_adam")
        )
    ),
    (3, "adam", "lookahead", {"lookahead": 4, "cache_rows": 60, "placement": "table_wise"}),
    (3, "adagrad", "lookahead", {"lookahead": 4, "wire": "float16"}),
    (2, "adam", "lookahead", {"lookahead": 4, "delayed_sync": False, "compress": True}),
]


def digest_of(results):
    """Of what all ranks saw and hold, in their order."""
    digest = hashlib.sha256()
    for pooled_of_step, pieces in results:
        for pooled in pooled_of_step:
            digest.update(np.ascontiguousarray(pooled.numpy()))
        for piece, weights, state in pieces:
            digest.update(f"{piece.table.name} {piece.rows} {piece.columns}".encode())
            for numbers in (weights, *(state[field] for field in sorted(state))):
                digest.update(np.ascontiguousarray(numbers))
    return digest.hexdigest()


def digests(worlds):
    """Of each run."""
    import cases

    for size, name, exchange, options in RUNS:
        arguments = {"look_at": (3,), **options}
        run = cases.run_alone if exchange == "local" else cases.run_stream
        yield digest_of(worlds(size).run(run, name, SIZES, exchange=exchange, **arguments))


def digest_of_all(worlds):
    """One for all runs."""
    return hashlib.sha256("".join(digests(worlds)).encode()).hexdigest()


def noted_digests():
    """Of processors, by their name."""
    rows = re.findall(r"^\| `(\S+)` \|.*\| `([0-9a-f]{64})` \|$", NOTE.read_text(), re.MULTILINE)
    return dict(rows)


def compared(digest, processor):
    """A digest with the one that is noted for a processor, in words."""
    name = processor.split()[0]
    noted = noted_digests().get(name)
    if noted is None:
        return f"{processor}: none is noted for {name}"
    return f"{processor}: {'as noted' if digest == noted else f'NOT the noted {noted}'}"


def main():
    """Print it."""
    from world import Worlds

    from pibroch.collectives.rounding import processor

    worlds = Worlds()
    try:
        assert len(RUNS) == 20
        digest = digest_of_all(worlds)
        print(digest)
        print(compared(digest, processor()))
    finally:
        worlds.close()


if __name__ == "__main__":
    main()
