"""Journals, row indices, arrays, libsvm and stream files with something wrong in them.

Each is refused in words or read; nothing hangs, and memory stays bounded. `make soak` tries a
thousand of each kind (``PIBROCH_SOAK_MUTATIONS``).
"""

import os
import random
import resource
import shutil
import time

import numpy as np
import pytest
import torch

import pibroch as pb
from pibroch.data.npy import NpySource
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.presets import criteo_npy_schema
from pibroch.data.schema import Schema
from pibroch.data.sparse_text import SparseTextSource
from pibroch.data.splits import SplitRule
from pibroch.data.streams.journal import Journal
from pibroch.embedding.row_index import load_state, state_of
from pibroch.errors import PibrochError
from stream_files import events, file_bytes, numbers, stream

TIMES = int(os.environ.get("PIBROCH_SOAK_MUTATIONS", "12"))
LIMIT_S = 20
MOST_KIB = 600 << 10
STREAM_KINDS = ["csv", "tsv", "jsonl", "csv.gz", "jsonl.zst", "parquet"]
WORDS = [b"-1", b"nan", b"1e400", b"9" * 400, b"\x00", b"\xff\xfe", b'"', b"[", b"{}", b"\n", b""]
LIBSVM = b"-1 1:0.5 101:1 205:1 207:1\n+1 qid:7 2:3 1:2.5e0 0103:1.0 # a comment\n" * 20
SCHEMA = """
label = "label"
[target.label]
values = { "-1" = 0, "+1" = 1 }
[dense.price]
column = "1"
transform = "identity"
[categorical.tags]
column = "100-299"
multi_hot = true
min_count = 1
"""


def wounded(data, chance):
    """Some bytes flipped, cut off, put in, left out or repeated."""
    at = chance.randrange(len(data))
    until = min(len(data), at + chance.randrange(1, 60))
    kind = chance.randrange(6)
    if kind == 0:
        flipped = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        return bytes(flipped)
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + chance.choice(WORDS) + data[at:]
    if kind == 3:
        return data[:at] + chance.choice(WORDS) + data[until:]
    if kind == 4:
        return data[:at] + data[at:until] * chance.randrange(2, 2000) + data[until:]
    return chance.randbytes(chance.randrange(200))


@pytest.fixture
def attempt():
    """``attempt(read)``: whether it was read; fails unless it is soon, in words, and in bounds."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def tried(read):
        begun = time.monotonic()
        try:
            read()
        except PibrochError as error:
            assert "bug in pibroch" not in str(error)
            is_read = False
        else:
            is_read = True
        assert time.monotonic() - begun < LIMIT_S
        return is_read

    yield tried
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MOST_KIB


@pytest.mark.parametrize("kind", STREAM_KINDS)
def test_files_of_a_stream(tmp_path, attempt, kind):
    chance = random.Random(kind)
    right = file_bytes(kind, events(0, 60))
    path = tmp_path / f"a.{kind}"
    for _ in range(-(-TIMES // len(STREAM_KINDS))):
        path.write_bytes(wounded(right, chance))
        reading = stream(tmp_path, most_bad_share=1.0)
        attempt(lambda reading=reading: [numbers(batch) for batch in reading])
        reading.close()


def test_journals(tmp_path, attempt):
    chance = random.Random(1)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_bytes(file_bytes("csv", events(0, 90)))
    journal = Journal(tmp_path / "right")
    reading = stream(tmp_path / "data", journal=journal)
    assert len([numbers(batch) for batch in reading]) > 9
    reading.close()
    (path,) = (tmp_path / "right").iterdir()
    right = path.read_bytes()
    for _ in range(TIMES):
        again = tmp_path / "again"
        shutil.rmtree(again, ignore_errors=True)
        again.mkdir()
        (again / path.name).write_bytes(wounded(right, chance))

        def go_on(folder=again):
            reading = stream(tmp_path / "data", journal=Journal(folder))
            try:
                found = sorted(number for batch in reading for number in numbers(batch))
            finally:
                reading.close()
            assert found == list(range(90)), "each event once"

        attempt(go_on)


def test_states_of_row_indices(attempt):
    chance = random.Random(2)
    rows = pb.Hashed(admit=pb.AfterCount(2), expire_after=5)
    table = pb.Table("a", 32, 4, rows=rows)
    embeddings = pb.Embeddings([table], pb.SGD(lr=0.1))
    for step in range(8):
        ids = torch.tensor([[step, step, 7, 7, step + 40, step + 40]])
        batch = pb.JaggedBatch.from_one_hot(torch.zeros(6, 0), ["a"], ids, torch.zeros(6))
        embeddings(batch).sum().backward()
    right = state_of(embeddings.row_indices)
    index = {"a": table.rows.index(table.num_rows)}
    assert attempt(lambda: load_state(index, right))
    for _ in range(TIMES):
        state = {name: np.array(array) for name, array in right.items()}
        name = chance.choice([name for name, array in state.items() if array.nbytes])
        array = state[name]
        how = chance.randrange(4)
        if how == 0:
            state[name] = array[: chance.randrange(len(array))]
        elif how == 1:
            state[name] = array.astype(chance.choice([np.int16, np.float64, np.uint8]))
        elif how == 2:
            del state[name]
        else:
            flat = array.reshape(-1).view(np.uint8)
            for _ in range(chance.randrange(1, 9)):
                flat[chance.randrange(len(flat))] = chance.choice([0, 1, 127, 128, 255])

        def go_on(state=state):
            index = {"a": table.rows.index(table.num_rows)}
            load_state(index, state)
            index["a"].rows_of(np.array([3, 7, 99]))
            index["a"].entries()

        attempt(go_on)


def test_arrays(tmp_path, attempt):
    chance = random.Random(3)
    rng = np.random.default_rng(0)
    arrays = {
        "dense": rng.random((50, 13), np.float32),
        "sparse": rng.integers(0, 9, (50, 26)).astype(np.int32),
        "labels": rng.integers(0, 2, (50, 1)).astype(np.int32),
    }
    right = {}
    for name, array in arrays.items():
        path = tmp_path / f"day_0_{name}.npy"
        np.save(path, array)
        right[path] = path.read_bytes()
    options = PrepareOptions(split=SplitRule.parse("none"))
    for number in range(TIMES):
        path = chance.choice([*right])
        data = right[path]
        head = chance.random() < 0.5  # of 128 bytes
        new = wounded(data[:128], chance) + data[128:] if head else wounded(data, chance)
        path.write_bytes(new)
        out = tmp_path / f"out-{number}"

        def read(out=out):
            source = NpySource(tmp_path / "day_0_dense.npy")
            prepare([source], criteo_npy_schema(), out, options)

        attempt(read)
        shutil.rmtree(out, ignore_errors=True)
        path.write_bytes(data)


def test_libsvm(tmp_path, attempt):
    chance = random.Random(4)
    schema = Schema.from_toml(SCHEMA)
    path = tmp_path / "train.txt"
    options = PrepareOptions(split=SplitRule.parse("none"), max_bad_fraction=1.0)
    for number in range(TIMES):
        path.write_bytes(wounded(LIBSVM, chance))
        out = tmp_path / f"out-{number}"
        attempt(
            lambda out=out: prepare([SparseTextSource(path, schema, False)], schema, out, options)
        )
        shutil.rmtree(out, ignore_errors=True)
