"""Weights from outside arrive in their rows, whatever they come in.

What does not fit is said before anything is written.
"""

import subprocess
import sys

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import save_file

import pibroch as pb
from pibroch.embedding.row_marks import SAVED
from pibroch.errors import ConfigError, DataError

ROWS = 50
DIM = 6
WEIGHTS = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
IDS = np.random.default_rng(1).permutation(ROWS)[:20]


def make(**optimizer):
    tables = [pb.Table("other", 9, DIM), pb.Table("user", ROWS, DIM)]
    return pb.Embeddings(tables, pb.Adagrad(lr=0.1, **optimizer), seed=1)


def sources(folder):
    np.save(folder / "w.npy", WEIGHTS.astype(np.float64))
    save_file(
        {"user": torch.from_numpy(WEIGHTS).double(), "b": torch.zeros(2)}, folder / "w.safetensors"
    )
    lists = pl.DataFrame({"vector": WEIGHTS.tolist(), "name": ["x"] * ROWS})
    lists.write_parquet(folder / "lists.parquet", row_group_size=7)
    pl.DataFrame({f"w{d}": WEIGHTS[:, d] for d in range(DIM)}).write_parquet(
        folder / "columns.parquet"
    )
    by_id = pl.DataFrame(
        {"id": IDS, "vector": pl.Series(WEIGHTS[IDS].tolist(), dtype=pl.Array(pl.Float32, DIM))}
    )
    by_id.write_parquet(folder / "ids.parquet")


CASES = {
    "array": lambda folder: (WEIGHTS, {}),
    "half": lambda folder: (WEIGHTS.astype(np.float16), {}),
    "tensor": lambda folder: (torch.from_numpy(WEIGHTS).bfloat16(), {}),
    "some": lambda folder: (WEIGHTS[IDS], {"ids": IDS}),
    "npy": lambda folder: (folder / "w.npy", {}),
    "safetensors": lambda folder: (str(folder / "w.safetensors"), {"tensor": "user"}),
    "lists": lambda folder: (folder / "lists.parquet", {}),
    "columns": lambda folder: (folder / "columns.parquet", {}),
    "ids": lambda folder: (folder / "ids.parquet", {"ids": "id"}),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_arrive_in_their_rows(tmp_path, monkeypatch, case):
    monkeypatch.setattr("pibroch.embedding.pretrained.CHUNK_BYTES", 4 * DIM * 8)
    sources(tmp_path)
    embeddings = make(average=0.9)
    before = {name: embeddings.shard.weights(name).copy() for name in ("other", "user")}
    embeddings.start_marks(SAVED)
    embeddings.start_marks("other")
    source, options = CASES[case](tmp_path)
    embeddings.load_weights("user", source, **options)
    expected = WEIGHTS.copy()
    if case == "half":
        expected = WEIGHTS.astype(np.float16).astype(np.float32)
    elif case == "tensor":
        expected = torch.from_numpy(WEIGHTS).bfloat16().float().numpy()
    elif case in ("some", "ids"):
        expected = before["user"]
        expected[IDS] = WEIGHTS[IDS]
    (other, user) = embeddings.pieces()
    assert np.array_equal(user.weights, expected)
    assert np.array_equal(user.state["average"], expected)
    assert np.array_equal(other.weights, before["other"]) and not other.marks[SAVED].any()
    for marks in user.marks.values():
        assert marks.sum() == (len(IDS) if case in ("some", "ids") else ROWS)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (WEIGHTS[:, :5], {}, r"weights \[50, 5\] for table 'user'; need \[rows, 6\]"),
        (WEIGHTS[0], {}, r"weights \[6\]"),
        (WEIGHTS[:49], {}, "49 rows for table 'user'; need 50"),
        (WEIGHTS[:2], {"ids": [1, 50]}, "id 50 in row 1"),
        (WEIGHTS[:2], {"ids": [-1, 5]}, "id -1 in row 0"),
        (WEIGHTS[:2], {"ids": [3, 3]}, "an id twice"),
        (WEIGHTS[:2], {"ids": [3]}, "need 2 whole numbers"),
        (np.where(np.arange(ROWS)[:, None] == 31, np.nan, WEIGHTS), {}, "in row 31"),
        (np.full((ROWS, DIM), "x"), {}, "need numbers"),
        ("nothing.npy", {}, "which is not there"),
        ("w.csv", {}, "a file that ends in .npy"),
        ("w.safetensors", {}, "none named as tensor"),
        ("w.safetensors", {"tensor": "c"}, "need one of b, user"),
        ("lists.parquet", {"tensor": "name"}, "need one of vector"),
        ("ids.parquet", {"ids": "row"}, "no column 'row'"),
        ("short.parquet", {}, "a list of 5 numbers in row 49 of column 'vector'"),
        ("cut.npy", {}, "cannot be read"),
        ("cut.parquet", {}, "cannot be read"),
        ("cut.safetensors", {}, "cannot be read"),
    ],
)
def test_what_does_not_fit_is_said_and_nothing_is_written(tmp_path, source, options, message):
    sources(tmp_path)
    pl.DataFrame({"vector": [*WEIGHTS[:49].tolist(), [1.0] * 5]}).write_parquet(
        tmp_path / "short.parquet"
    )
    for name in ("w.npy", "w.safetensors", "lists.parquet"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / f"cut{(tmp_path / name).suffix}").write_bytes(data[: len(data) // 2])
    embeddings = make()
    before = embeddings.shard.records.copy()
    with pytest.raises(DataError, match=message):
        embeddings.load_weights(
            "user", tmp_path / source if isinstance(source, str) else source, **options
        )
    assert np.array_equal(embeddings.shard.records, before)
    with pytest.raises(ConfigError, match="weights for table 'shop'"):
        embeddings.load_weights("shop", WEIGHTS)


LOAD = """
import resource, sys, numpy as np, pibroch as pb
table = pb.Table("user", 2_000_000, 16, initializer=pb.Zeros())
embeddings = pb.Embeddings([table], pb.SGD(lr=0.1))
embeddings.load_weights("user", np.zeros((1, 16), np.float32), ids=[0])  # loads libraries
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
embeddings.load_weights("user", sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, embeddings.shard.records[-1, 0])
"""


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
def test_a_large_matrix_takes_little_memory_beside_its_rows(tmp_path, suffix):
    weights = np.ones((2_000_000, 16), np.float32)
    path = tmp_path / f"w.{suffix}"
    np.save(path, weights) if suffix == "npy" else save_file({"w": torch.from_numpy(weights)}, path)
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    kilobytes, last = ran.stdout.split()
    assert float(last) == 1.0
    assert int(kilobytes) << 10 < 0.3 * weights.nbytes, (
        "on top of the rows, which were there before"
    )


HASHED = {
    "at once": pb.Hashed(),
    "the third": pb.Hashed(pb.AfterCount(3)),
    "sketch": pb.Hashed(pb.AfterCount(2, sketch=True)),
}


def hashed(kind=HASHED["at once"], **options):
    table = pb.Table("user", 30, DIM, rows=kind)
    return pb.Embeddings([table], pb.Adagrad(lr=0.1, initial_accumulator=0.5), seed=1, **options)


def batch_of(ids):
    return pb.JaggedBatch.from_one_hot(
        torch.zeros(len(ids), 0), ["user"], torch.as_tensor(ids)[None], torch.zeros(len(ids))
    )


def train_on(embeddings, ids):
    out = embeddings(batch_of(ids))
    out.sum().backward()


def looked_up(embeddings, ids):
    with torch.no_grad():
        return embeddings(batch_of(ids))[:, 0].numpy()


@pytest.mark.parametrize("kind", HASHED.values(), ids=HASHED)
def test_ids_of_a_source_are_given_rows_in_rising_order(tmp_path, monkeypatch, kind):
    """Of rows that other ids had before, whose optimizer state goes with them."""
    monkeypatch.setattr("pibroch.embedding.pretrained.CHUNK_BYTES", 4 * DIM * 8)
    ids = np.random.default_rng(2).integers(-(2**63), 2**63 - 1, 20)
    save_file(
        {"keys": torch.from_numpy(ids), "user": torch.from_numpy(WEIGHTS[:20])},
        tmp_path / "w.safetensors",
    )
    embeddings = hashed(kind)
    embeddings.start_marks(SAVED)
    embeddings.load_weights("user", tmp_path / "w.safetensors", ids="keys")
    index = embeddings.row_indices["user"]
    assert index.rows_of(np.sort(ids)).tolist() == list(range(20))
    assert index.counts_of(np.arange(20)).tolist() == [kind.admit.count] * 20
    assert np.array_equal(looked_up(embeddings, ids), WEIGHTS[:20])
    (view,) = embeddings.pieces()
    assert view.marks[SAVED][:20].all() and (view.state["sum"][:] == 0.5).all()
    assert index.learn(ids[:3]).fresh_ids.tolist() == [], "they are there"
    for _ in range(3):
        train_on(embeddings, ids[:10].tolist())
    moved = looked_up(embeddings, ids)
    assert (moved[:10] != WEIGHTS[:10]).any() and np.array_equal(moved[10:], WEIGHTS[10:20])


def test_rows_of_ids_that_left_begin_anew_and_ids_that_stay_keep_their_state():
    embeddings = hashed(pb.Hashed(expire_after=2))
    train_on(embeddings, [7, 8, 9])
    for _ in range(3):
        train_on(embeddings, [5])
    (view,) = embeddings.pieces()
    index = embeddings.row_indices["user"]
    assert index.rows_of(np.array([5, 7, 8, 9])).tolist() == [3, -1, -1, -1]
    kept = view.state["sum"][3].copy()
    assert (kept > 0.5).all() and (view.state["sum"][:3] > 0.5).all()
    embeddings.load_weights("user", WEIGHTS[:4], ids=np.array([5, 2, 1, 3]))
    assert index.rows_of(np.array([5, 1, 2, 3])).tolist() == [3, 0, 1, 2]
    (view,) = embeddings.pieces()
    assert (view.state["sum"][:3] == 0.5).all()
    assert np.array_equal(view.state["sum"][3], kept)
    assert np.array_equal(looked_up(embeddings, [5, 2, 1, 3]), WEIGHTS[:4])


def test_a_fixed_table_becomes_a_hashed_one():
    fixed = make()
    embeddings = hashed()
    (_, user) = fixed.pieces()
    embeddings.load_weights("user", user.weights[:30])
    assert np.array_equal(looked_up(embeddings, list(range(30))), user.weights[:30])
    before = embeddings.row_indices["user"].state()["entries"].copy()
    with pytest.raises(DataError, match="1 more ids with 0 of 30 rows free"):
        embeddings.load_weights("user", WEIGHTS[:1], ids=[99])
    damaged = WEIGHTS[:2].copy()
    damaged[1, 3] = np.nan
    half = hashed()
    with pytest.raises(DataError, match="NaN"):
        half.load_weights("user", damaged)
    assert not half.row_indices["user"].entries()[0].size, "nothing was learned"
    assert np.array_equal(embeddings.row_indices["user"].state()["entries"], before)
