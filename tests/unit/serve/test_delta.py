"""Deltas: an export and a delta are together an export of the newer checkpoint."""

import resource
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import pibroch as pb
from pibroch.data import EncodedDataset, Loader
from pibroch.errors import CheckpointError, ConfigError, DamagedCheckpointError, StorageError
from pibroch.serve.delta import export_delta
from pibroch.serve.export import ExportOptions, SavedRows, export_checkpoint
from pibroch.serve.from_delta import open_exported
from pibroch.serve.vocabularies import find_vocabularies
from pibroch.state.delta_format import CHANGED, ROW_IDS, DeltaRows, read_delta
from pibroch.state.delta_rows import RowsToWrite, write_rows
from pibroch.state.export_format import DENSE, read_export
from pibroch.state.exported_rows import encoded
from pibroch.state.manifest import read_manifest
from pibroch.state.tensor_file import TensorFile
from small_run import files_below, make_config, run_command, train_here

DTYPES = ("float32", "float16", "int8")
EVERY = ("train.checkpoint_every=5", "train.steps=20", "train.evaluate_every=20", "train.keep=9")


@pytest.fixture(scope="module")
def steps(data, tmp_path_factory):
    """Checkpoints of one run at steps 5 (full), and 10, 15, 20 (changes since step 5)."""
    config = make_config(data, *EVERY, "train.full_checkpoint_every=9")
    run, _ = train_here(config, tmp_path_factory.mktemp("delta") / "run")
    return {step: run.path / "checkpoints" / f"step-{step:08d}" for step in (5, 10, 15, 20)}


@pytest.fixture(scope="module")
def batch(data):
    return next(iter(Loader(EncodedDataset.open(data).split("test"), 400)))


def logits(path, batch, beside=None):
    return pb.Predictor.open(path, beside=beside).logits(batch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_together_they_are_the_newer_export(steps, batch, tmp_path, dtype):
    """A chain of deltas, and each of them since the export; the export in many files."""
    options = ExportOptions(dtype, shard_bytes=3000)
    export_checkpoint(steps[5], tmp_path / "1", options)
    before = pb.Predictor.open(tmp_path / "1")
    for number, step in ((2, 10), (3, 15), (4, 20)):
        whole = tmp_path / f"whole{step}"
        export_checkpoint(steps[step], whole, options)
        expected = logits(whole, batch)
        export_delta(steps[step], tmp_path / f"{number - 1}", tmp_path / f"{number}")
        export_delta(steps[step], tmp_path / "1", tmp_path / f"since1-{step}")
        for delta in (f"{number}", f"since1-{step}"):
            actual = pb.Predictor.open(tmp_path / delta, beside=before)
            assert torch.equal(actual.logits(batch), expected)
            assert torch.equal(logits(tmp_path / delta, batch), expected)
            assert actual.step == step and actual.version == read_delta(tmp_path / delta)[0].version
            before = actual if delta == f"{number}" else before
    assert not torch.equal(expected, logits(tmp_path / "1", batch))
    assert (
        find_vocabularies(tmp_path / "4").fingerprint
        == find_vocabularies(tmp_path / "1").fingerprint
    )


@contextmanager
def files_of_at_most(size):
    """The kernel refuses to let a file grow further, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_is_full_leaves_nothing(steps, tmp_path):
    """At whatever byte it refuses: a reason, no trace of the delta, the base whole.

    With room again all is well.
    """
    export_checkpoint(steps[5], tmp_path / "1", ExportOptions("int8"))
    export_delta(steps[10], tmp_path / "1", tmp_path / "expected")
    expected = files_below(tmp_path / "expected")
    shutil.rmtree(tmp_path / "expected")
    before = files_below(tmp_path)
    sizes = sorted(len(content) for content in expected.values())
    for size in (0, 1, *(size - 1 for size in sizes)):
        with (
            pytest.raises(StorageError, match=r"room for the export.*export again"),
            files_of_at_most(size),
        ):
            export_delta(steps[10], tmp_path / "1", tmp_path / "2")
        assert files_below(tmp_path) == before and not (tmp_path / "2").exists()
    export_delta(steps[10], tmp_path / "1", tmp_path / "2")
    assert files_below(tmp_path / "2") == expected


def test_training_says_which_rows_changed(steps, batch, tmp_path):
    """Without a look at the tables of the full checkpoint, nor at the export's.

    They may even be damaged.
    """
    export_checkpoint(steps[5], tmp_path / "1", ExportOptions("int8"))
    expected = {}
    counts = []
    for step in (10, 20):
        export_checkpoint(steps[step], tmp_path / f"whole{step}", ExportOptions("int8"))
        expected[step] = logits(tmp_path / f"whole{step}", batch)
        checkpoint = shutil.copytree(steps[step], tmp_path / f"copy{step}")
        for file in checkpoint.glob("tables/*"):
            if "@step-" not in file.name:
                file.write_bytes(b"\0" * file.stat().st_size)
        counts.append(export_delta(checkpoint, tmp_path / "1", tmp_path / f"{step}").num_rows)
        assert torch.equal(logits(tmp_path / f"{step}", batch), expected[step])
    assert 0 < counts[0] < counts[1]
    # back from step 20 to step 10: rows that were touched only between go back to the export's
    export_delta(steps[10], tmp_path / "20", tmp_path / "back")
    assert torch.equal(logits(tmp_path / "back", batch), expected[10])
    (tmp_path / "1" / "origin.json").unlink()
    compared = export_delta(steps[20], tmp_path / "1", tmp_path / "compared")
    assert (
        torch.equal(logits(tmp_path / "compared", batch), expected[20])
        and 0 < compared.num_rows <= counts[1]
    )
    with pytest.raises(CheckpointError, match="changed since"):
        export_delta(tmp_path / "copy20", tmp_path / "1", tmp_path / "no")


CASES = {
    "averages": "train.average=0.9",
    "narrow rows": "embedding.dtype=bfloat16",
    "full ones": "train.log_every=1",
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_was_trained(data, batch, tmp_path, case):
    every = 1 if case == "full ones" else 9
    config = make_config(
        data, *EVERY, f"train.full_checkpoint_every={every}", CASES[case], "train.steps=10"
    )
    run, _ = train_here(config, tmp_path / "run")
    first, second = (run.path / "checkpoints" / f"step-{step:08d}" for step in (5, 10))
    export_checkpoint(first, tmp_path / "1")
    export_checkpoint(second, tmp_path / "whole")
    delta = export_delta(second, tmp_path / "1", tmp_path / "2")
    assert delta.num_rows > 0 and torch.equal(
        logits(tmp_path / "2", batch), logits(tmp_path / "whole", batch)
    )
    again = export_delta(second, tmp_path / "whole", tmp_path / "3")
    assert again.num_rows == 0 and torch.equal(
        logits(tmp_path / "3", batch), logits(tmp_path / "whole", batch)
    )


def test_equal_deltas_have_equal_bytes(steps, tmp_path):
    export_checkpoint(steps[5], tmp_path / "1")
    for name in ("2", "3"):
        export_delta(steps[10], tmp_path / "1", tmp_path / name)
    assert files_below(tmp_path / "2") == files_below(tmp_path / "3")
    assert sorted(files_below(tmp_path / "2")) == [
        "delta.json",
        "dense.safetensors",
        "rows.safetensors",
    ]
    assert not list(tmp_path.glob(".*"))


def test_what_is_shared_is_shared(steps, batch, tmp_path):
    """A delta beside an open predictor.

    The same maps of tables and dictionaries, nothing verified again.
    """
    export_checkpoint(steps[5], tmp_path / "1")
    export_delta(steps[10], tmp_path / "1", tmp_path / "2")
    first = pb.Predictor.open(tmp_path / "1")
    shutil.rmtree(tmp_path / "1")  # it stays mapped
    second = pb.Predictor.open(tmp_path / "2", beside=first)
    ours, other = (predictor._model.lookup._shards[0].rows for predictor in (first, second))
    assert np.shares_memory(ours, other) and second._model.vocabularies is first._model.vocabularies
    with pytest.raises(CheckpointError, match="not beside it"):
        pb.Predictor.open(tmp_path / "2")


def test_refusals(steps, data, clicks, tmp_path):
    export_checkpoint(steps[5], tmp_path / "1")
    export_delta(steps[10], tmp_path / "1", tmp_path / "2")
    with pytest.raises(ConfigError, match="--overwrite"):
        export_delta(steps[10], tmp_path / "1", tmp_path / "2")
    with pytest.raises(ConfigError, match="which the base has"):
        version = pb.Predictor.open(tmp_path / "1").version
        export_delta(steps[10], tmp_path / "1", tmp_path / "3", ExportOptions(version=version))
    with pytest.raises(CheckpointError, match="data and tables"):
        export_delta(clicks.run, tmp_path / "1", tmp_path / "3")
    with pytest.raises(CheckpointError, match="no export"):
        export_delta(steps[10], steps[5], tmp_path / "3")
    for name in ("delta.json", "dense.safetensors", "rows.safetensors"):
        content = (tmp_path / "2" / name).read_bytes()
        (tmp_path / "2" / name).write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        with pytest.raises(CheckpointError, match=name):
            pb.Predictor.open(tmp_path / "2")
        (tmp_path / "2" / name).write_bytes(content)
    assert not (tmp_path / "3").exists() and not list(tmp_path.glob(".*"))


def test_the_command(steps, data, tmp_path):
    export_checkpoint(steps[5], tmp_path / "1", ExportOptions("int8"))
    ran = run_command(
        "export", steps[20], "--since", tmp_path / "1", "--out", tmp_path / "2", "--data", data
    )
    assert ran.returncode == 0, ran.stderr
    assert "rows changed since" in ran.stdout and "AUC" in ran.stdout
    ran = run_command(
        "export", steps[20], "--since", tmp_path / "1", "--out", tmp_path / "3", "--dtype", "int8"
    )
    assert ran.returncode == 2 and "--dtype" in ran.stderr


def all_weights(checkpoint):
    """Of all rows of all tables, end to end."""
    manifest = read_manifest(checkpoint)
    return np.concatenate(
        [
            SavedRows.of(checkpoint, manifest).weights(name, range(table.num_rows))
            for name, table in manifest.tables.items()
        ]
    )


def rewritten(delta, out, weights, files, deleted):
    """A delta of the same base and dense layers, with these rows in files of their own."""
    out.mkdir()
    shutil.copy(delta / DENSE, out / DENSE)
    manifest, _ = read_delta(delta)
    digests = {DENSE: manifest.files[DENSE]}
    rows = []
    for number, ids in enumerate(files):
        name = f"rows-{number}.safetensors"
        gone = deleted if number == 0 else deleted[:0]
        parts = [RowsToWrite(some, weights[some]) for some in (ids[:3], ids[3:])]
        dtype = read_export(out.parent / "1").dtype
        digests[name] = write_rows(out / name, parts, weights.shape[1], dtype, gone)
        rows.append(DeltaRows(file=name, num_rows=len(ids), num_deleted=len(gone)))
    manifest.model_copy(
        update={"version": out.name, "rows": tuple(rows), "files": digests, "time": 1.5}
    ).write(out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_in_several_files_and_those_that_are_no_more_count_as_zeros(
    steps, batch, tmp_path, dtype
):
    export_checkpoint(steps[5], tmp_path / "1", ExportOptions(dtype))
    export_delta(steps[10], tmp_path / "1", tmp_path / "2")
    weights = all_weights(steps[10])
    with TensorFile(tmp_path / "2", CHANGED) as file:
        changed = np.array(file.mapped(ROW_IDS))
    deleted = np.setdiff1d(np.arange(len(weights)), changed)[::2]
    files = [changed[0::2], changed[1::2]]
    rewritten(tmp_path / "2", tmp_path / "3", weights, files, deleted)
    expected = weights.copy()
    expected[deleted] = 0
    base = open_exported(tmp_path / "1")
    for opened in (open_exported(tmp_path / "3"), open_exported(tmp_path / "3", base)):
        stored = opened.lookup.stored(np.arange(len(weights)))
        assert np.array_equal(stored, encoded(expected, dtype))
    export_checkpoint(steps[15], tmp_path / "whole", ExportOptions(dtype))
    export_delta(steps[15], tmp_path / "3", tmp_path / "4")
    assert torch.equal(logits(tmp_path / "4", batch), logits(tmp_path / "whole", batch))
    assert read_delta(tmp_path / "3")[0].time == 1.5 and len(deleted) > 10


@pytest.mark.parametrize("kind", ["twice", "falling", "beyond", "deleted twice"])
def test_files_that_do_not_fit_together_are_refused(steps, tmp_path, kind):
    export_checkpoint(steps[5], tmp_path / "1", ExportOptions())
    export_delta(steps[10], tmp_path / "1", tmp_path / "2")
    weights = all_weights(steps[10])
    ids = np.arange(10)
    files = {
        "twice": [ids, ids[3:4]],
        "falling": [ids[::-1]],
        "beyond": [np.array([1, len(weights)])],
        "deleted twice": [ids],
    }[kind]
    weights = np.concatenate([weights, weights[:1]])
    rewritten(
        tmp_path / "2", tmp_path / "3", weights, files, ids[4:5] if "del" in kind else ids[:0]
    )
    with pytest.raises(DamagedCheckpointError, match=r"two places|other row ids"):
        pb.Predictor.open(tmp_path / "3")


def test_a_base_that_is_not_there_is_named(steps, tmp_path):
    export_checkpoint(steps[5], tmp_path / "1", ExportOptions(version="the-first"))
    export_delta(steps[10], tmp_path / "1", tmp_path / "2")
    shutil.rmtree(tmp_path / "1")
    with pytest.raises(CheckpointError, match="put the-first into"):
        pb.Predictor.open(tmp_path / "2")


@pytest.mark.parametrize("dtype", DTYPES)
def test_bags_of_several_rows_are_summed_as_in_the_whole_export(clicks, tmp_path, dtype):
    """Row by row, whether a row's newest version is the export's or a delta's."""
    config = make_config(
        clicks.data, "train.steps=3", "train.batch_size=40", "train.checkpoint_every=1"
    )
    run, _ = train_here(config, tmp_path / "run")
    (before, after) = (run.checkpoints_path / f"step-{step:08d}" for step in (2, 3))
    options = ExportOptions(dtype, shard_bytes=2000)
    export_checkpoint(before, tmp_path / "1", options)
    export_checkpoint(after, tmp_path / "whole", options)
    export_delta(after, tmp_path / "1", tmp_path / "2")
    whole = pb.Predictor.open(tmp_path / "whole")
    batch = whole.encode(clicks.rows[:300])
    rows = pb.Predictor.open(tmp_path / "2")
    assert torch.equal(rows.embed(batch), whole.embed(batch))
