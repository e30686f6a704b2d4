import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from pibroch.errors import CheckpointError, TrainingError
from pibroch.state import tensor_file
from pibroch.state.files import verify_file
from pibroch.state.tensor_file import Stream, TensorFile, write_tensors


def read(path, name, first=0, last=None):
    with TensorFile(path.parent, path.name) as file:
        stop = file.shape(name)[0] if last is None else last
        return np.concatenate([chunk.copy() for _, chunk in file.chunks(name, range(first, stop))])


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 70), dim=st.integers(1, 5), buffer_bytes=st.sampled_from([8, 64, 1 << 20])
)
def test_strided_views_go_out_and_come_back(tmp_path_factory, rows, dim, buffer_bytes):
    path = tmp_path_factory.mktemp("tensors") / "t.safetensors"
    records = np.random.default_rng(0).standard_normal((rows, dim + 3)).astype(np.float32)
    tensors = {
        "weight": records[:, :dim],
        "sum": records[:, dim : dim + 1],
        "count": np.array(7, np.int64),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "BUFFER_BYTES", buffer_bytes)
        verify_file(path.parent, path.name, write_tensors(path, tensors))
        if rows > 2:
            np.testing.assert_array_equal(read(path, "weight", 1, rows - 1), records[1:-1, :dim])
    for name, array in load_file(path).items():
        np.testing.assert_array_equal(array, tensors[name])


def test_a_stream_is_written_like_the_array_it_makes(tmp_path):
    array = np.arange(30, dtype=np.float32).reshape(10, 3)
    stream = Stream(array.dtype, array.shape, iter([array[:4], array[4:4], array[4:]]))
    assert write_tensors(tmp_path / "a", {"weight": array}) == write_tensors(
        tmp_path / "b", {"weight": stream}
    )


def test_large_views_are_not_copied_whole(tmp_path):
    records = np.ones((400_000, 30), np.float32)
    tracemalloc.start()
    write_tensors(tmp_path / "t", {"weight": records[:, :20]})
    with TensorFile(tmp_path, "t") as file:
        assert sum(len(chunk) for _, chunk in file.chunks("weight", range(400_000))) == 400_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < records.nbytes * 0.8  # a copy of the view alone would be 32 MB


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_numbers_are_not_saved(tmp_path, bad):
    array = np.zeros((10, 2), np.float32)
    array[9, 1] = bad
    with pytest.raises(TrainingError, match="'weight'"):
        write_tensors(tmp_path / "t", {"weight": array})


def test_what_is_not_there_is_named(tmp_path):
    write_tensors(tmp_path / "t", {"weight": np.zeros((3, 2), np.float32)})
    with pytest.raises(CheckpointError, match="no 'sum'"):
        read(tmp_path / "t", "sum")
    (tmp_path / "t").write_bytes((tmp_path / "t").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="95 bytes; need 96"):
        read(tmp_path / "t", "weight")


def test_a_full_disk_is_an_os_error():
    """/dev/full refuses every write as a full disk does."""
    with pytest.raises(OSError, match="No space"):
        write_tensors(Path("/dev/full"), {"weight": np.zeros((1000, 1000), np.float32)})
