"""Tables of raw ids in exports and deltas: ids that have rows score as training had them.

While a run publishes: ../train/test_publishing.py, and over processes
tests/distributed/test_publishing.py.
"""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import pibroch as pb
from here_host import HereHost
from pibroch.data import EncodedDataset, Loader
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.errors import CheckpointError, ConfigError, DamagedCheckpointError
from pibroch.serve.delta import export_delta
from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.serve.from_checkpoint import saved_indices
from pibroch.serve.from_delta import open_exported
from pibroch.serve.parts import Part
from pibroch.serve.plain_tables import export_tables
from pibroch.serve.predictor import Predictor
from pibroch.serve.sampled_users import sampled_users
from pibroch.serve.split_rows import RowSplit
from pibroch.state.export_format import IDS, read_export
from pibroch.state.exported_ids import TableIds, read_ids, rows_of, write_ids
from pibroch.state.manifest import read_manifest
from published_versions import used_rows
from small_run import files_below, make_config, run_command, train_here

SMALL = [
    "embedding.rows={name='hashed', capacity=14}",
    "embedding.tables.C2.rows=identity",
    "train.batch_size=6",
    "train.epochs=none",
    "train.steps=60",
    "train.checkpoint_every=20",
    "train.keep=9",
]


@pytest.fixture(scope="module")
def batch(data):
    return next(iter(Loader(EncodedDataset.open(data).split("test"), 200)))


@pytest.fixture(scope="module")
def steps(data, tmp_path_factory):
    """Checkpoints: 20 is full, 40 and 60 have what changed since."""
    config = make_config(data, *SMALL, "train.full_checkpoint_every=9")
    run, _ = train_here(config, tmp_path_factory.mktemp("raw") / "run")
    return {step: run.checkpoints_path / f"step-{step:08d}" for step in (20, 40, 60)}


def saved_ids(checkpoint, min_count=1):
    indices = saved_indices(checkpoint, read_manifest(checkpoint))
    return {name: TableIds.in_index(index, min_count) for name, index in indices.items()}


def logits(path, batch, beside=None):
    return pb.Predictor.open(path, beside=beside).logits(batch)


def test_ids_with_rows_are_those_that_are_kept(steps, tmp_path):
    export_checkpoint(steps[20], tmp_path / "20", ExportOptions())
    export_delta(steps[60], tmp_path / "20", tmp_path / "60")
    checkpoint, export, delta = map(
        pb.Predictor.open, (steps[20], tmp_path / "20", tmp_path / "60")
    )
    (at_20, at_60) = map(saved_ids, (steps[20], steps[60]))
    features = {each.name: each for each in export.schema.categorical}
    for name, of_20 in at_20.items():
        for predictor in (checkpoint, export):
            ids = np.sort(predictor.ids_with_rows(features[name]))
            assert np.array_equal(ids, of_20.ids) and len(ids)
        assert {*at_60[name].ids} <= {*delta.ids_with_rows(features[name]).tolist()}
    (fixed,) = features.keys() - at_20.keys() & {"C2"}
    assert export.ids_with_rows(features[fixed]) == checkpoint.ids_with_rows(features[fixed])
    users = sampled_users(delta, 64)
    assert delta.logits(users).isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_chain_of_deltas_is_the_newest_export(steps, batch, tmp_path, dtype):
    options = ExportOptions(dtype, shard_bytes=500)
    export_checkpoint(steps[20], tmp_path / "20", options)
    before = pb.Predictor.open(tmp_path / "20")
    for step, base in ((40, 20), (60, 40)):
        export_checkpoint(steps[step], tmp_path / f"whole-{step}", options)
        expected = logits(tmp_path / f"whole-{step}", batch)
        export_delta(steps[step], tmp_path / str(base), tmp_path / str(step))
        export_delta(steps[step], tmp_path / "20", tmp_path / f"since-20-{step}")
        (tmp_path / "20" / "origin.json").rename(tmp_path / "origin.json")  # so all are compared
        export_delta(steps[step], tmp_path / str(base), tmp_path / f"compared-{step}")
        (tmp_path / "origin.json").rename(tmp_path / "20" / "origin.json")
        for name in (f"{step}", f"since-20-{step}", f"compared-{step}"):
            assert logits(tmp_path / name, batch).equal(expected), name
            assert logits(tmp_path / name, batch, before).equal(expected), name
        if dtype == "float32":
            assert logits(steps[step], batch).equal(expected)
    changes = read_ids(tmp_path / "60", read_export(tmp_path / "20").tables, is_delta=True)
    assert "C2" not in changes and sum(int((each.rows < 0).sum()) for each in changes.values()) > 20
    newest, whole = (open_exported(tmp_path / name).lookup for name in ("60", "whole-60"))
    rows = used_rows(tmp_path / "whole-60")
    assert np.array_equal(newest.stored(rows), whole.stored(rows))


def test_files_end_behind_the_last_row_that_an_id_has(data, batch, tmp_path):
    rows = "embedding.rows={name='hashed', capacity=1000000, admit_after=2}"
    run, _ = train_here(make_config(data, *SMALL, rows), tmp_path / "run")
    big = train_here(make_config(data, *SMALL, "embedding.rows.capacity=40"), tmp_path / "big")[0]
    manifest = export_checkpoint(run.path, tmp_path / "export")
    assert manifest.format_version == 2
    ids = read_ids(tmp_path / "export", manifest.tables)
    num_rows = {table.name: table.num_rows for table in manifest.tables}
    assert sum(shard.num_rows for shard in manifest.shards) == num_rows["C2"] + sum(
        len(each.ids) for each in ids.values()
    )
    assert logits(tmp_path / "export", batch).equal(logits(run.path, batch))
    assert not logits(run.path, batch).equal(logits(big.path, batch)), "some are not admitted"
    export_checkpoint(run.path, tmp_path / "again")
    assert files_below(tmp_path / "export") == files_below(tmp_path / "again")


def test_ids_seen_seldom_are_left_out(steps, data, batch, tmp_path):
    checkpoint = steps[60]
    manifest = export_checkpoint(checkpoint, tmp_path / "few", ExportOptions(min_count=12))
    index = saved_ids(checkpoint, 12)
    tables = {table.name: table for table in manifest.tables}
    assert all(tables[name].num_rows == max(1, len(each.ids)) for name, each in index.items())
    assert 0 < sum(len(each.ids) for each in index.values()) < 14 * 20
    predictor = pb.Predictor.open(tmp_path / "few")
    vectors = predictor.embed(batch)
    expected = pb.Predictor.open(checkpoint).embed(batch)
    for place, feature in enumerate(predictor.features):
        ids = batch.select((feature,)).values.numpy()
        is_in = (
            torch.from_numpy(np.isin(ids, index[feature].ids))
            if feature in index
            else torch.ones(len(ids), dtype=torch.bool)
        )
        assert vectors[is_in, place].equal(expected[is_in, place])
        assert not vectors[~is_in, place].any()
    words = ["export", checkpoint, "--out", tmp_path / "cli", "--min-count", 12, "--data", data]
    ran = run_command(*words)
    assert ran.returncode == 0 and "AUC" in ran.stdout, ran.stderr
    assert files_below(tmp_path / "cli") == files_below(tmp_path / "few")
    with pytest.raises(ConfigError, match="a delta of ids counted at least 3"):
        export_delta(checkpoint, tmp_path / "few", tmp_path / "d", ExportOptions(min_count=3))
    with pytest.raises(CheckpointError, match="whose tables are not those of"):
        export_delta(checkpoint, tmp_path / "few", tmp_path / "d")
    plain, _ = train_here(make_config(data, "train.epochs=none", "train.steps=2"), tmp_path / "run")
    with pytest.raises(ConfigError, match="at least 3 times, of tables without raw ids"):
        export_checkpoint(plain.path, tmp_path / "d", ExportOptions(min_count=3))


def test_other_ids_than_tables_need_are_damage(steps, tmp_path):
    tables = export_checkpoint(steps[20], tmp_path).tables
    mapped = read_ids(tmp_path, tables)
    known = {name: TableIds(*map(np.copy, each)) for name, each in mapped.items()}
    del mapped
    ids, rows = known["C1"]
    for damaged in (
        TableIds(ids[::-1].copy(), rows),
        TableIds(ids, rows + 14),
        TableIds(ids, rows - 14),
        TableIds(ids, rows[1:]),
        TableIds(ids, rows.astype(np.float64)),
    ):
        write_ids(tmp_path / IDS, {**known, "C1": damaged})
        with pytest.raises(DamagedCheckpointError, match="other ids of table 'C1'"):
            read_ids(tmp_path, tables)
    write_ids(tmp_path / IDS, {"C1": TableIds(ids, rows)})
    with pytest.raises(DamagedCheckpointError, match="C3"):
        read_ids(tmp_path, tables)


def test_layers_are_as_a_dictionary():
    rng = np.random.default_rng(1)
    layers, known = [], {}
    for _ in range(30):
        ids = np.unique(rng.integers(-50, 50, 20))
        now = dict(zip(ids.tolist(), rng.permutation(len(ids)).tolist(), strict=True))
        now = {**now, **dict(list(known.items())[::2])}
        table = TableIds.of(np.array(list(now.values())), np.array(list(now)))
        changes = table.changes_since(layers) if layers else table
        layers = [*layers[:1], *(each.with_changes(changes) for each in layers[1:2] or ())]
        layers = layers if len(layers) == 2 else [*layers, changes]
        known = now
        asked = rng.integers(-60, 60, 200)
        assert rows_of(asked, layers).tolist() == [known.get(each, -1) for each in asked.tolist()]


def test_hosts_with_parts_of_the_rows_score_alike(steps, batch, tmp_path):
    export_checkpoint(steps[20], tmp_path / "1", ExportOptions(shard_bytes=500))
    export_delta(steps[60], tmp_path / "1", tmp_path / "2")
    hosts = tuple(HereHost(tmp_path / "1", Part(number, 3)) for number in (1, 2, 3))
    for name in ("1", "2"):
        split = Predictor.open(tmp_path / name, split=RowSplit(None, hosts))
        split.reach_rows()
        assert split.logits(batch).equal(logits(tmp_path / name, batch))


def test_an_id_without_a_row_is_a_vector_of_zeros_in_a_sequence(tmp_path):
    data = tmp_path / "data"
    synthesize(SyntheticOptions(num_samples=3000, max_table_rows=60, history=6), data)
    settings = ["model.name=din", "model.max_length=9", "model.histories={history='C2'}"]
    rows = "embedding.rows={name='hashed', capacity=40, admit_after=3}"
    small = ["train.batch_size=10", "train.epochs=none", "train.steps=30"]
    config = make_config(data, *settings, rows, *small)
    run, _ = train_here(config, tmp_path / "run")
    batch = next(iter(Loader(EncodedDataset.open(data).split("test"), 100)))
    export_checkpoint(run.path, tmp_path / "export")
    index = read_ids(tmp_path / "export", read_export(tmp_path / "export").tables)["C2"]
    ids = batch.select(("history",)).values.numpy()
    is_absent = rows_of(ids, [index]) < 0
    assert is_absent.any() and not is_absent.all()
    vectors = open_exported(tmp_path / "export").lookup(batch)["history"].values
    assert not vectors[is_absent].any() and vectors[~is_absent].any(1).all()
    assert logits(tmp_path / "export", batch).equal(logits(run.path, batch))


def test_tables_are_files_with_ids_that_another_kind_of_table_takes(steps, batch, tmp_path):
    out = tmp_path / "tables"
    ran = run_command("checkpoint", "convert", steps[60], out, "--to", "safetensors")
    assert ran.returncode == 0 and "with their ids" in ran.stdout, ran.stderr
    tables = read_manifest(steps[60]).tables
    assert {path.name for path in out.iterdir()} == {f"{name}.safetensors" for name in tables}
    index = saved_ids(steps[60])
    hashed = [pb.Table(name, 30, 4, rows=pb.Hashed(pb.AfterCount(2))) for name in index]
    fixed = pb.Table("C2", tables["C2"].num_rows, 4)
    embeddings = pb.Embeddings([*hashed, fixed], pb.SGD(lr=0.1))
    for name in tables:
        path = out / f"{name}.safetensors"
        embeddings.load_weights(name, path, tensor="weight", ids="ids")
    with torch.no_grad():
        vectors = embeddings(batch.select(embeddings.features))
    predictor = pb.Predictor.open(steps[60])
    expected = predictor.embed(batch)
    places = [predictor.features.index(feature) for feature in embeddings.features]
    assert vectors.equal(expected[:, places])
    rows = np.sort(index["C1"].ids)
    assert embeddings.row_indices["C1"].rows_of(rows).tolist() == list(range(len(rows)))
    with pytest.raises(ConfigError, match="which exists"):
        export_tables(steps[60], out)


def test_unknown_ids_read_the_row_that_they_share(data, batch, tmp_path):
    rows = "embedding.rows={name='hashed', capacity=15, admit_after=2, unknown_row=true}"
    config = make_config(data, *SMALL, rows, "train.full_checkpoint_every=9")
    run, _ = train_here(config, tmp_path / "run")
    steps = {step: run.checkpoints_path / f"step-{step:08d}" for step in (20, 40, 60)}
    export_checkpoint(steps[20], tmp_path / "20", ExportOptions(shard_bytes=500))
    export_delta(steps[60], tmp_path / "20", tmp_path / "delta")
    export_checkpoint(steps[60], tmp_path / "60")
    expected = logits(steps[60], batch)
    assert logits(tmp_path / "60", batch).equal(expected)
    assert logits(tmp_path / "delta", batch).equal(expected)
    hosts = tuple(HereHost(tmp_path / "20", Part(number, 3)) for number in (1, 2, 3))
    split = Predictor.open(tmp_path / "delta", split=RowSplit(None, hosts))
    split.reach_rows()
    assert split.logits(batch).equal(expected)
    export_tables(steps[60], tmp_path / "tables")
    for min_count in (1, 12, 10**6):
        out = tmp_path / f"counted-{min_count}"
        export_checkpoint(steps[60], out, ExportOptions(min_count=min_count))
        predictor = pb.Predictor.open(out)
        known = saved_ids(steps[60], min_count)
        vectors = predictor.embed(batch)
        for name in known:
            ids = batch.select((name,)).values.numpy()
            unknown = load_file(tmp_path / "tables" / f"{name}.safetensors")["unknown_weight"]
            is_in = torch.from_numpy(np.isin(ids, known[name].ids))
            found = vectors[:, predictor.features.index(name)]
            assert (found == unknown).all(1).equal(~is_in)
            assert unknown.any()
    with pytest.raises(CheckpointError, match="whose tables are not those of"):
        config = make_config(data, *SMALL, rows.replace("true", "false"))
        other, _ = train_here(config, tmp_path / "other")
        export_delta(other.path, tmp_path / "20", tmp_path / "no")
