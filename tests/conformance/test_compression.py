"""Compression on the wire changes bytes, never bits."""

import numpy as np
import pytest
from test_lookahead import check_same
from test_world import whole_records

import cases
from cases import OPTIMIZERS, SHAPES, run_stream

SIZES = [500, 3, 400, 0, 7, 300, 450]  # messages worth codes, and some that are not


@pytest.mark.parametrize("size", [1, 2, 3])
def test_numbers_arrive_in_fewer_bytes(worlds, size):
    for rank, (received, message) in enumerate(worlds(size).run(cases.exchange_numbers)):
        for kind in range(5):
            for sender in range(size):
                sent = cases.numbers_between(sender, rank)[kind]
                assert all(
                    np.array_equal(a, b) for a, b in zip(received[kind][sender], sent, strict=True)
                )
        raw = [
            sum(
                part.nbytes
                for p in range(size)
                if p != rank
                for part in cases.numbers_between(rank, p)[kind]
            )
            for kind in range(5)
        ]
        lengths = 8 * (size - 1)
        assert all(
            num_bytes == counted <= most + lengths
            for (num_bytes, counted), most in zip(message, raw, strict=True)
        )
        assert message[0][0] <= 0.85 * raw[0]
        assert message[1][0] == raw[1] + lengths  # noise travels as it is


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [2, 3])
def test_same_bits_with_and_without(worlds, size, wire):
    for name in ("row_wise_adagrad", "adam"):
        reference = worlds(size).run(run_stream, name, SIZES, wire=wire)
        expected = reference, whole_records(reference, SHAPES["odd_dims"], OPTIMIZERS[name])
        runs = [
            {"placement": placement}
            for placement in ("row_wise", "table_wise_pooled", "replicated")
        ]
        runs += [
            {"exchange": "lookahead", "lookahead": 3, "cache": cache}
            for cache in ("lrpp", "partitioned", "replicated")
        ]
        for options in runs:
            if wire != "float32" and options.get("placement") == "table_wise_pooled":
                continue  # sums of rounded rows are not rounded sums
            check_same(
                worlds(size).run(run_stream, name, SIZES, wire=wire, compress=True, **options),
                expected,
                name,
            )


def test_fewer_bytes_are_counted(worlds):
    plain, packed = (
        worlds(2).run(
            cases.bytes_of_a_stream,
            "adam",
            SIZES,
            exchange="lookahead",
            lookahead=3,
            compress=compress,
        )
        for compress in (False, True)
    )
    for before, after in zip(plain, packed, strict=True):
        assert before.keys() == after.keys()
        assert all(after[purpose] <= before[purpose] + 200 for purpose in before)
        assert sum(after.values()) < 0.95 * sum(before.values())
        assert after["ids"] == before["ids"]


@pytest.mark.parametrize("exchange", ["alltoall", "lookahead"])
@pytest.mark.parametrize(
    ("option", "values"), [("compress", (True, False)), ("wire", ("float32", "bfloat16"))]
)
def test_ranks_that_want_different_wires_are_refused(worlds, exchange, option, values):
    for rank, message in enumerate(
        worlds(2).run(cases.refuse_other_wires, exchange, option, values)
    ):
        assert message.startswith(
            f"got {option} {values[rank]!r} on rank {rank}, {values[1 - rank]!r} on rank {1 - rank}"
        )
