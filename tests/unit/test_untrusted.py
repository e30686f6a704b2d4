"""What strangers write is refused in words.

Files that are elsewhere, no files, too large, too deep, or of another content.
"""

import json
import os
import struct

import numpy as np
import pytest

from pibroch.errors import CheckpointError, ConfigError, DamagedCheckpointError
from pibroch.state.tensor_file import TensorFile, write_tensors
from pibroch.untrusted import (
    MAX_JSON_BYTES,
    Refusal,
    open_file,
    read_json,
    read_manifest,
    write_manifest,
)

REFUSAL = Refusal(DamagedCheckpointError, "use another")


def refused(words):
    return pytest.raises(DamagedCheckpointError, match=words)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../secret", "inner/../../secret", "a\0b", "", "..\\secret"]
)
def test_names_that_lead_out_of_the_folder(tmp_path, name):
    (tmp_path / "secret").write_text("{}")
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    with refused("need a path inside the folder"):
        open_file(folder, name, REFUSAL)


def test_links_devices_pipes_and_folders(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").write_text("{}")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "device").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    (folder / "inner").mkdir()
    (folder / "own").write_text("[1]")
    (folder / "within").symlink_to("own")
    (tmp_path / "alias").symlink_to(folder)
    with refused("a link that leads out"):
        open_file(folder, "out", REFUSAL)
    for name in ("device", "pipe", "inner"):
        with refused(f"{name}, which is no regular file"):
            open_file(folder, name, REFUSAL)
    with refused("no .*nothing"):
        open_file(folder, "nothing", REFUSAL)
    assert read_json(tmp_path / "alias", "within", REFUSAL) == [1]


def test_json_is_bounded(tmp_path):
    path = tmp_path / "m"
    for content, words in (
        (b"[" * 200_000, "no JSON"),
        (b"[" * 101 + b"]" * 101, "deeper than 100"),
        (b"\xff{}", "no JSON"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "no JSON"),
        (b"", "no JSON"),
    ):
        path.write_bytes(content)
        with refused(words):
            read_json(tmp_path, "m", REFUSAL)
    with path.open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with refused("m of 67,108,865 bytes; need at most 67,108,864"):
        read_json(tmp_path, "m", REFUSAL)
    for content in ("[]", '"text"', "{}", '{"sha256": 3}', '{"sha256": "0"}'):
        path.write_text(content)
        with refused("sha256|checksum"):
            read_manifest(tmp_path, "m", REFUSAL)
    deep = []
    for _ in range(120):
        deep = [deep]
    with pytest.raises(ConfigError, match="deeper than 100"):
        write_manifest(path, {"extra": deep})
    write_manifest(path, {"extra": [1]})
    assert read_manifest(tmp_path, "m", REFUSAL)[0] == {"extra": [1]}


def with_header(path, header, data=b"\0" * 24, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


GOOD = {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    ("header", "length", "words"),
    [
        ({"w": GOOD}, 2**63, "a header of 9,223,372,036,854,775,808 bytes"),
        ({"w": GOOD}, 0, "a header of 0 bytes"),
        (b"[" * 5000, None, "no JSON"),
        ([1], None, "valid dictionary"),
        ({"w": 3}, None, "`w`"),
        ({"w": GOOD | {"dtype": "F99"}}, None, "a dtype of"),
        ({"w": GOOD | {"shape": [-3, -2]}}, None, "`w.shape.0` is -3"),
        ({"w": GOOD | {"shape": [2**62, 2**62]}}, None, "offsets as far apart"),
        ({"w": GOOD | {"shape": "ab"}}, None, "`w.shape`"),
        ({"w": GOOD | {"data_offsets": [8, 32]}}, None, "begins at 8"),
        ({"w": GOOD | {"data_offsets": [24, 0]}}, None, "offsets as far apart"),
        ({"w": GOOD | {"data_offsets": [0, 24, 9]}}, None, "`w.data_offsets"),
        ({"w": GOOD, "x": GOOD}, None, "'x' begins at 0"),
        ({"w": GOOD | {"shape": [3, 3], "data_offsets": [0, 36]}}, None, "as its header says"),
        ({"w": {"dtype": "F32"}}, None, "it has no `w.shape`"),
    ],
)
def test_headers_of_tensors(tmp_path, header, length, words):
    with_header(tmp_path / "t", header, length=length)
    with pytest.raises(CheckpointError, match=words) as error:
        TensorFile(tmp_path, "t")
    assert str(tmp_path / "t") in str(error.value)


def test_rows_beyond_a_tensor(tmp_path):
    write_tensors(tmp_path / "t", {"a": np.zeros((3, 2), np.float32), "b": np.ones(9, np.float32)})
    with TensorFile(tmp_path, "t") as file, pytest.raises(CheckpointError, match="need 4 rows"):
        next(file.chunks("a", range(1, 4)))
