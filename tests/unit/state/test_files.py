import os

import pytest

from pibroch.errors import CheckpointError, StorageError
from pibroch.state import files
from pibroch.state.files import FileDigest, explained_refusal, verify_file
from pibroch.storage import link_or_copy, remove_leftovers

DIGEST_OF_X = FileDigest(1, "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881")


@pytest.mark.parametrize("content", [b"x", b"y", b"xx", None])
def test_a_file_is_as_its_digest_says_or_named(tmp_path, content):
    path = tmp_path / "weights"
    if content is not None:
        path.write_bytes(content)
    if content == b"x":
        verify_file(path.parent, path.name, DIGEST_OF_X)
        return
    with pytest.raises(CheckpointError, match="weights"):
        verify_file(path.parent, path.name, DIGEST_OF_X)


def test_the_disk_s_refusal_says_what_to_do():
    message = r"No space left.*step-1.*--resume"
    with (
        pytest.raises(StorageError, match=message),
        explained_refusal("step-1"),
        open("/dev/full", "wb") as file,
    ):
        file.write(b"x")


def test_links_share_their_bytes_and_copies_stand_in(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"x")
    link_or_copy(tmp_path / "a", tmp_path / "linked")
    assert os.path.samefile(tmp_path / "a", tmp_path / "linked")

    def refuse(source, target):
        raise OSError("no links here")

    monkeypatch.setattr(files.os, "link", refuse)
    link_or_copy(tmp_path / "a", tmp_path / "copied")
    assert (tmp_path / "copied").read_bytes() == b"x" and not os.path.samefile(
        tmp_path / "a", tmp_path / "copied"
    )


def test_leftovers_of_killed_processes_go(tmp_path):
    (tmp_path / ".step-1.77.tmp").mkdir()
    (tmp_path / "step-1").mkdir()
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["step-1"]
