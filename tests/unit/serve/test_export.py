import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pibroch as pb
from pibroch.data import EncodedDataset, Loader
from pibroch.errors import CheckpointError, ConfigError, RowIdError
from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.state.export_format import read_export
from small_run import files_below, make_config, train_here

DTYPES = ("float32", "float16", "int8")
BOUND = {"float32": 0, "float16": 2e-3, "int8": 2e-2}


@pytest.fixture(scope="module")
def exports(clicks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    for dtype in DTYPES:
        export_checkpoint(clicks.run, folder / dtype, ExportOptions(dtype))
    return folder


@pytest.fixture(scope="module")
def batches(clicks):
    return list(Loader(EncodedDataset.open(clicks.data).split("test"), 100))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_those_of_the_checkpoint(clicks, exports, batches, dtype):
    expected = pb.Predictor.open(clicks.run)
    predictor = pb.Predictor.open(exports / dtype)
    for batch in batches:
        difference = (predictor(batch) - expected(batch)).abs().max()
        assert difference <= BOUND[dtype]
    assert (
        predictor.features == expected.features
        and predictor.schema == expected.schema
        and predictor.step == expected.step
    )
    assert torch.equal(
        predictor.score_raw(clicks.rows[:50]), predictor(predictor.encode(clicks.rows[:50]))
    )
    with pytest.raises(CheckpointError, match="an export"):
        _ = predictor.config


CASES = {
    "dcnv2, one part a rank": ["model.name=dcnv2", "train.steps=5"],
    "deepfm": ["model.name=deepfm", "train.steps=5"],
    "bf16": ["train.bf16=true", "train.steps=5"],
    "narrow rows": ["embedding.dtype=bfloat16", "train.steps=12"],
    "averages, incremental": [
        "train.average=0.9",
        "train.steps=13",
        "train.full_checkpoint_every=9",
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_float32_in_many_shards_has_the_bits_of_the_checkpoint(data, tmp_path, case):
    run, _ = train_here(make_config(data, *CASES[case]), tmp_path / "run")
    manifest = export_checkpoint(run.path, tmp_path / "export", ExportOptions(shard_bytes=3000))
    assert len(manifest.shards) > 2
    expected = pb.Predictor.open(run.path)
    predictor = pb.Predictor.open(tmp_path / "export")
    for batch in Loader(EncodedDataset.open(data).split("test"), 100):
        assert torch.equal(predictor.logits(batch), expected.logits(batch))


def test_an_export_stands_alone(clicks, exports, tmp_path):
    """Elsewhere, in a process that knows neither run nor data."""
    moved = shutil.copytree(exports / "int8", tmp_path / "moved")
    rows = clicks.rows[:7]
    program = (
        "import json, sys, pibroch as pb\n"
        "print(json.dumps(pb.Predictor.open(sys.argv[1]).score_raw(json.load(sys.stdin)).tolist()))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(moved)],
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=True,
        env=dict(os.environ),
    )
    expected = pb.Predictor.open(exports / "int8").score_raw(rows).numpy()
    assert np.abs(np.array(json.loads(ran.stdout)) - expected).max() < 1e-6


def test_bytes_of_rows(data, tmp_path):
    for dim, share in ((16, 0.38), (64, 0.29)):
        run, _ = train_here(
            make_config(data, f"model.dim={dim}", "train.steps=1"), tmp_path / f"run{dim}"
        )
        sizes = {}
        for dtype in DTYPES:
            manifest = export_checkpoint(
                run.path, tmp_path / f"{dtype}{dim}", ExportOptions(dtype, shard_bytes=50_000)
            )
            sizes[dtype] = sum(manifest.files[shard.file].size_bytes for shard in manifest.shards)
        assert (
            sizes["int8"] <= share * sizes["float32"] and sizes["float16"] < 0.51 * sizes["float32"]
        )


def test_equal_exports_have_equal_bytes_and_one_name(clicks, exports, tmp_path):
    export_checkpoint(clicks.run, tmp_path / "again", ExportOptions("int8"))
    assert files_below(tmp_path / "again") == files_below(exports / "int8")
    names = {read_export(exports / dtype).version for dtype in DTYPES}
    assert len(names) == 3
    assert (
        export_checkpoint(clicks.run, tmp_path / "named", ExportOptions(version="2026-11")).version
        == "2026-11"
    )
    with pytest.raises(ConfigError, match="letters"):
        export_checkpoint(clicks.run, tmp_path / "odd", ExportOptions(version="a/b"))


def test_whole_or_not_at_all(clicks, exports, tmp_path, monkeypatch):
    out = shutil.copytree(exports / "int8", tmp_path / "out")
    before = files_below(tmp_path)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="--overwrite"):
        export_checkpoint(clicks.run, out)
    with monkeypatch.context() as patch:
        patch.setattr("pibroch.serve.export.write_vocabularies", fail)
        with pytest.raises(pb.errors.StorageError, match="No space left"):
            export_checkpoint(clicks.run, out, ExportOptions(overwrite=True))
        with pytest.raises(pb.errors.StorageError):
            export_checkpoint(clicks.run, tmp_path / "new")
    assert files_below(tmp_path) == before and not (tmp_path / "new").exists()
    export_checkpoint(clicks.run, out, ExportOptions(overwrite=True))
    assert files_below(out) == files_below(exports / "float32") and [out] == list(
        tmp_path.iterdir()
    )
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").touch()
    with pytest.raises(ConfigError, match="no export"):
        export_checkpoint(clicks.run, tmp_path / "taken", ExportOptions(overwrite=True))


def test_without_its_data_a_checkpoint_is_not_exported(clicks, tmp_path):
    moved = clicks.data.rename(tmp_path / "moved")
    try:
        with pytest.raises(CheckpointError, match="--data"):
            export_checkpoint(clicks.run, tmp_path / "out")
        export_checkpoint(clicks.run, tmp_path / "out", ExportOptions(data=moved))
    finally:
        moved.rename(clicks.data)


def test_damage_is_refused_by_name(exports, tmp_path):
    folder = shutil.copytree(exports / "int8", tmp_path / "export")
    names = [
        "export.json",
        "dense.safetensors",
        "vocabularies.safetensors",
        "tables/rows-00000-of-00001.safetensors",
    ]
    assert sorted([*names, "origin.json"]) == sorted(files_below(folder))
    for name in names:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        with pytest.raises(CheckpointError, match=Path(name).name):
            pb.Predictor.open(folder)
        (folder / name).write_bytes(content)
    pb.Predictor.open(folder)


def test_ids_outside_their_table(exports, batches):
    batch = batches[0]
    batch.values[3] = 10**6
    try:
        with pytest.raises(RowIdError, match="sample 3"):
            pb.Predictor.open(exports / "int8")(batch)
    finally:
        batch.values[3] = 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_tables_take_no_memory_of_their_own(data, tmp_path):
    """Of 40 MB of rows that were all read, a process has next to nothing for itself."""
    from pibroch.serve.from_export import open_export

    run, _ = train_here(make_config(data, "train.steps=1", "model.dim=64"), tmp_path / "run")
    export_checkpoint(run.path, tmp_path / "export")
    opened = open_export(tmp_path / "export")
    batch = next(iter(Loader(EncodedDataset.open(data).split("train"), 2000)))
    opened.lookup(batch)
    maps = Path("/proc/self/smaps").read_text().split("\n")
    start = next(i for i, line in enumerate(maps) if "rows-00000-of-00001.safetensors" in line)
    fields = dict(
        line.split(":")
        for line in maps[start + 1 : start + 20]
        if ":" in line and "-" not in line.split(":")[0]
    )
    assert int(fields["Private_Dirty"].split()[0]) == 0 and int(fields["Rss"].split()[0]) > 0


def test_the_command_says_what_was_lost(clicks, tmp_path):
    from small_run import run_command

    arguments = (
        "export",
        clicks.run,
        "--out",
        tmp_path / "out",
        "--dtype",
        "int8",
        "--data",
        clicks.data,
    )
    ran = run_command(*arguments)
    assert ran.returncode == 0, ran.stderr
    words = ran.stdout.replace("\n", " ").split()
    before, after = (float(words[words.index(word) - 1]) for word in ("before,", "after"))
    assert 0.5 < before < 1 and abs(before - after) <= 2e-3
    assert read_export(tmp_path / "out").version in words
    for more, message in (
        (arguments, "--overwrite"),
        ((*arguments, "--split", "none", "--overwrite"), "--split"),
    ):
        ran = run_command(*more)
        assert ran.returncode == 2 and message in ran.stderr
