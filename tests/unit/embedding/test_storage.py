import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from pibroch.embedding import storage
from pibroch.embedding.storage import atomic_folder, read_into, remove_leftovers, verify_file, write_tensors
from pibroch.errors import CheckpointError, StorageError, TrainingError


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(0, 70), dim=st.integers(1, 5), buffer_bytes=st.sampled_from([8, 64, 1 << 20]))
def test_strided_views_go_out_and_come_back(tmp_path_factory, rows, dim, buffer_bytes):
    path = tmp_path_factory.mktemp("tensors") / "t.safetensors"
    records = np.random.default_rng(0).standard_normal((rows, dim + 3)).astype(np.float32)
    tensors = {"weight": records[:, :dim], "sum": records[:, dim : dim + 1], "count": np.array(7, np.int64)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "BUFFER_BYTES", buffer_bytes)
        digest = write_tensors(path, tensors)
        other = np.zeros_like(records)
        read_into(path, {"weight": other[:, :dim], "sum": other[:, dim : dim + 1]})
    verify_file(path, digest)
    for name, array in load_file(path).items():
        np.testing.assert_array_equal(array, tensors[name])
    np.testing.assert_array_equal(other[:, : dim + 1], records[:, : dim + 1])
    assert not other[:, dim + 1 :].any()


def test_large_views_are_not_copied_whole(tmp_path):
    import tracemalloc

    records = np.ones((400_000, 30), np.float32)
    tracemalloc.start()
    write_tensors(tmp_path / "t", {"weight": records[:, :20]})
    read_into(tmp_path / "t", {"weight": records[:, 10:]})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < records.nbytes * 0.8  # a copy of the view alone would be 32 MB


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_numbers_are_not_saved(tmp_path, bad):
    array = np.zeros((10, 2), np.float32)
    array[9, 1] = bad
    with pytest.raises(TrainingError, match="'weight'"):
        write_tensors(tmp_path / "t", {"weight": array})


def test_another_shape_is_refused(tmp_path):
    write_tensors(tmp_path / "t", {"weight": np.zeros((3, 2), np.float32)})
    with pytest.raises(CheckpointError, match=r"\(3, 2\)"):
        read_into(tmp_path / "t", {"weight": np.zeros((2, 2), np.float32)})


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with atomic_folder(tmp_path / "done") as folder:
        (folder / "a").write_text("x")
        assert not (tmp_path / "done").exists()
    assert (tmp_path / "done" / "a").read_text() == "x"
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "failed") as folder:
        (folder / "a").write_text("x")
        raise RuntimeError
    assert os.listdir(tmp_path) == ["done"]


def test_a_full_disk_is_a_storage_error():
    """/dev/full refuses every write as a full disk does."""
    with pytest.raises(OSError, match="No space"):
        write_tensors_to_device = storage.Path("/dev/full")
        write_tensors(write_tensors_to_device, {"weight": np.zeros((1000, 1000), np.float32)})


def test_the_disk_s_refusal_leaves_nothing_behind(tmp_path):
    with pytest.raises(StorageError, match="No space left"), atomic_folder(tmp_path / "step") as folder:
        (folder / "table").symlink_to("/dev/full")
        write_tensors(folder / "table", {"weight": np.zeros((1000, 1000), np.float32)})
    assert not list(tmp_path.iterdir())


def test_leftovers_of_killed_processes_go(tmp_path):
    (tmp_path / ".step-1.77.tmp").mkdir()
    (tmp_path / "step-1").mkdir()
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["step-1"]
