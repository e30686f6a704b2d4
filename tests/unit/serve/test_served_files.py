"""Exports by a stranger, that arrive file by file, or that change while served."""

import hashlib
import json
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pibroch as pb
from pibroch.data.encode import index_of
from pibroch.errors import DamagedCheckpointError
from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.untrusted import checksum
from served import serving, until

RELOAD = ("--reload-every", 0.05)
ROWS = "tables/rows-00000-of-00001.safetensors"


@pytest.fixture(scope="module")
def exports(clicks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    for dtype in ("float32", "float16", "int8"):
        export_checkpoint(clicks.run, folder / dtype, ExportOptions(dtype))
    return folder


def rewritten(source, folder, file, change):
    """A copy in which tensors of a file are others, with a manifest that fits."""
    shutil.copytree(source, folder)
    tensors = {name: array.copy() for name, array in load_file(folder / file).items()}
    change(tensors)
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    save_file({name: tensors[name] for name in order}, folder / file)
    data = (folder / file).read_bytes()
    content = json.loads((folder / "export.json").read_text())
    digest = hashlib.sha256(data).hexdigest()
    content["files"][file] = {"size_bytes": len(data), "sha256": digest}
    del content["sha256"]
    content["sha256"] = checksum(content)
    (folder / "export.json").write_text(json.dumps(content))
    return folder


def feature_of(tensors):
    return next(name.removesuffix(".slots") for name in tensors if name.endswith(".slots"))


def of_slots(change):
    """A change of the first feature's codes and slots."""

    def changed(tensors):
        name = feature_of(tensors)
        codes, slots = change(tensors[f"{name}.codes"], tensors[f"{name}.slots"])
        tensors[f"{name}.codes"] = codes
        tensors[f"{name}.slots"] = slots

    return changed


def filled(codes, slots):
    return codes, np.where(slots < 0, 0, slots).astype(np.int32)


def far_out(codes, slots):
    return codes, np.where(slots == 1, 1 << 30, slots).astype(np.int32)


def swapped(codes, slots):
    swap = np.where(slots == 0, 1, np.where(slots == 1, 0, slots))
    return codes, swap.astype(np.int32)


def equal_hashes(codes, slots):
    others = (np.arange(len(codes), dtype=np.uint64) << np.uint64(32)) + np.uint64(5)
    return others, index_of(others)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (far_out, "slots from -1 to 1073741824"),
        (lambda codes, slots: (codes, slots - 7), "slots from -8"),
        (filled, "none of them free"),
        (lambda codes, slots: (codes, slots[:-3]), "not a power of two"),
        (lambda codes, slots: (codes, slots[:0]), "not a power of two"),
        (lambda codes, slots: (codes, slots.astype(np.int64)), "int64"),
        (swapped, "which the slots do not find"),
        (lambda codes, slots: (codes[:-1], index_of(codes[:-1])), "codes for"),
        (lambda codes, slots: (codes.reshape(1, -1), slots), r"uint64 \[1, "),
    ],
)
def test_dictionaries_are_checked(exports, tmp_path, change, words):
    folder = rewritten(
        exports / "int8", tmp_path / "e", "vocabularies.safetensors", of_slots(change)
    )
    with pytest.raises(DamagedCheckpointError, match=words):
        pb.Predictor.open(folder)


def test_codes_that_all_fall_into_one_slot(monkeypatch):
    from pibroch.data import encode

    monkeypatch.setattr(encode, "MOST_USED_SLOTS", 100)
    codes, slots = equal_hashes(np.zeros(200, np.uint64), None)
    assert "200 used slots in a row" in encode.index_problem(codes, slots) or "201" in (
        encode.index_problem(codes, slots)
    )
    assert encode.index_problem(codes[:50], index_of(codes[:50])) == ""


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_none(exports, tmp_path, dtype, number):
    def spoil(tensors):
        rows = tensors["rows"]
        if dtype == "int8":
            rows[5, :4] = np.frombuffer(np.float32(number).tobytes(), np.uint8)
        else:
            rows[5, 1] = number

    folder = rewritten(exports / dtype, tmp_path / "e", ROWS, spoil)
    with pytest.raises(DamagedCheckpointError, match="NaN or infinite numbers in row 5 of"):
        pb.Predictor.open(folder)


def test_dense_layers_that_are_none(exports, tmp_path):
    def spoil(tensors):
        next(iter(tensors.values())).reshape(-1)[0] = np.nan

    folder = rewritten(exports / "int8", tmp_path / "e", "dense.safetensors", spoil)
    with pytest.raises(pb.errors.CheckpointError, match="NaN or infinite numbers in"):
        pb.Predictor.open(folder)


def score(server, clicks):
    return server.ask("POST", "/score", {"rows": clicks.rows[:24]})


@pytest.mark.parametrize("how", ["written to", "cut"])
@pytest.mark.parametrize("file", [ROWS, "vocabularies.safetensors"])
def test_files_changed_while_they_are_served(exports, clicks, tmp_path, how, file):
    """No answer from changed files, no crash; ready says so.

    The next version is taken, though the last is spoiled.
    """
    folder = shutil.copytree(exports / "float32", tmp_path / "models" / "1")
    with serving(folder.parent, *RELOAD) as server:
        right = score(server, clicks).json["scores"]
        with (folder / file).open("r+b") as opened:
            if how == "cut":
                opened.truncate(4096)
            else:
                opened.seek(-64, 2)
                opened.write(b"\x40" * 64)
        # files are looked at once in some milliseconds, and a read of cut ones before that is fatal
        until(lambda: server.ask("GET", "/v2/health/ready").status == 503)
        answer = score(server, clicks)
        assert answer.status == 503 and how in answer.reason and file in answer.reason
        assert server.ask("GET", "/v2/health/live").status == 200
        until(lambda: "is not served any more" in server.complaints())
        shutil.copytree(exports / "float32", tmp_path / "next")
        (tmp_path / "next").rename(folder.parent / "2")
        until(lambda: server.ask("GET", "/v2/health/ready").status == 200)
        assert score(server, clicks).json["scores"] == right
        server.end()


def test_a_manifest_that_arrives_before_its_files(exports, clicks, tmp_path):
    first = shutil.copytree(exports / "float32", tmp_path / "models" / "1")
    before, after = (pb.Predictor.open(exports / d).version for d in ("float32", "int8"))
    with serving(first.parent, *RELOAD) as server:
        coming = first.with_name("2")
        coming.mkdir()
        shutil.copy(exports / "int8" / "export.json", coming)
        until(lambda: f"{before} stays in service" in server.complaints())
        assert score(server, clicks).json["model_version"] == before
        for name in ("dense.safetensors", "vocabularies.safetensors"):
            shutil.copy(exports / "int8" / name, coming)
        shutil.copytree(exports / "int8" / "tables", coming / "tables")
        until(lambda: score(server, clicks).json["model_version"] == after)
        assert server.metric("pibroch_model_loads") == 2
        server.end()


def test_what_is_refused_is_not_read_again_at_once(exports, tmp_path):
    from pibroch.serve import store as stores

    first = shutil.copytree(exports / "int8", tmp_path / "models" / "1")
    store = stores.ModelStore(first.parent)
    shutil.copytree(exports / "float16", first.with_name("2"))
    (first.with_name("2") / ROWS).unlink()
    assert not store.refresh() and store.num_failed == 1
    waits = []
    for _ in range(12):
        store._refused = stores._Refused.of(store._refused.target, "", store._refused)
        waits.append(store._refused.wait_s)
    assert waits[:3] == [2, 4, 8] and waits[-1] == stores.LONGEST_RETRY_S
    shutil.copy(exports / "float16" / ROWS, first.with_name("2") / ROWS)
    assert not store.refresh()  # it is not time
    store._refused = replace(store._refused, again_at=time.monotonic())
    assert store.refresh(), "it is whole now, with the manifest that it had"
