"""The names of a folder's files: each is seen, and folders that stay as they are are not read."""

import os
import shutil
import zlib

import pytest

from pibroch.data.streams import listing
from pibroch.data.streams.listing import Listing
from pibroch.errors import DataError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(listing, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(listing, "SHARE_OF_TIME", 0)


@pytest.fixture
def scanned(monkeypatch):
    """Folders that are read from now on."""
    paths = []
    scandir = os.scandir

    def counting(path):
        if not isinstance(path, int):  # of shutil
            paths.append(os.path.basename(path))
        return scandir(path)

    monkeypatch.setattr("pibroch.data.streams.listing.os.scandir", counting)
    return paths


def touched(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def let_the_clock_tick(path):
    """A later change has another time than an earlier one."""
    path.touch()
    before = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == before:
        path.touch()


def test_files_of_sub_folders_are_there_in_the_order_of_their_paths(tmp_path):
    names = ["b.csv", "dt=1/a.csv", "dt=1/hour=2/x.csv", "dt=2/a.csv"]
    hidden = ["_SUCCESS", "_temporary/0/a.csv", ".a.csv", "dt=2/c.csv.tmp", "dt=3.part/a.csv"]
    for name in [*names, *hidden]:
        touched(tmp_path / name)
    files = Listing(tmp_path, 1)
    assert files.names(0) == names
    assert files.unfinished() == [
        ".a.csv",
        "_SUCCESS",
        "_temporary",
        "dt=2/c.csv.tmp",
        "dt=3.part",
    ]


def test_a_file_goes_to_a_partition_by_its_path(tmp_path):
    names = [f"dt={day}/{part}.csv" for day in range(4) for part in range(4)]
    for name in names:
        touched(tmp_path / name)
    files = Listing(tmp_path, 3)
    for number in range(3):
        expected = [name for name in names if zlib.crc32(name.encode()) % 3 == number]
        assert files.names(number) == expected


def test_only_folders_that_have_changed_are_read_again(tmp_path, monkeypatch, scanned):
    monkeypatch.setattr(listing, "_SETTLED_S", 0.0)
    clock = tmp_path / "clock"
    tmp_path = tmp_path / "root"
    for name in ("a/1.csv", "b/1.csv", "c/d/1.csv"):
        touched(tmp_path / name)
    files = Listing(tmp_path, 1)
    files.names(0)
    assert sorted(scanned) == sorted([tmp_path.name, "a", "b", "c", "d"])
    version = files.version
    scanned.clear()
    let_the_clock_tick(clock)
    files.names(0)
    assert scanned == [] and files.version == version and files.looks == 2
    touched(tmp_path / "c/d/2.csv")
    assert files.names(0) == ["a/1.csv", "b/1.csv", "c/d/1.csv", "c/d/2.csv"]
    assert scanned == ["d"] and files.version > version
    let_the_clock_tick(clock)
    shutil.rmtree(tmp_path / "c")
    assert files.names(0) == ["a/1.csv", "b/1.csv"]
    let_the_clock_tick(clock)
    (tmp_path / "a/1.csv").rename(tmp_path / "a/0.csv")
    assert files.names(0) == ["a/0.csv", "b/1.csv"]


def test_a_folder_that_has_just_changed_is_read_again_whatever_its_times_say(tmp_path, scanned):
    """A name may come within one tick of the file system's clock, behind a look in it."""
    files = Listing(tmp_path, 1)
    files.names(0)
    files.names(0)
    assert len(scanned) == 2


def test_a_folder_whose_times_never_change_is_read_now_and_then(tmp_path, monkeypatch, scanned):
    monkeypatch.setattr(listing, "_SETTLED_S", 0.0)
    monkeypatch.setattr(listing, "_TRUSTED_S", 0.0)
    files = Listing(tmp_path, 1)
    files.names(0)
    files.names(0)
    assert len(scanned) == 2


def test_the_next_look_waits_in_proportion_to_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(listing, "SHARE_OF_TIME", 1e9)
    files = Listing(tmp_path, 1)
    assert files.names(0) == []
    touched(tmp_path / "a.csv")
    assert files.names(0) == [] and files.looks == 1


def test_links_to_files_are_files_and_links_to_folders_are_named_once(tmp_path, caplog):
    touched(tmp_path / "data/a.csv")
    (tmp_path / "data/b.csv").symlink_to(tmp_path / "data/a.csv")
    (tmp_path / "data/around").symlink_to(tmp_path, target_is_directory=True)
    files = Listing(tmp_path / "data", 1)
    assert files.names(0) == files.names(0) == ["a.csv", "b.csv"]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "data/around is a link to a folder" in message


def test_a_root_may_come_and_not_go(tmp_path, caplog):
    root = tmp_path / "left"
    files = Listing(root, 1)
    assert files.names(0) == files.names(0) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"no directory {root} yet, which is a partition of the stream"
    ]
    touched(root / "a.csv")
    assert files.names(0) == ["a.csv"]
    shutil.rmtree(root)
    with pytest.raises(DataError, match=r"no directory .*left any more"):
        files.names(0)


def test_a_name_that_is_not_utf_8_is_refused_until_it_is_gone(tmp_path):
    odd = os.fsencode(tmp_path) + b"/a\xff.csv"
    os.close(os.open(odd, os.O_CREAT))
    files = Listing(tmp_path, 1)
    for _ in range(2):
        with pytest.raises(DataError, match=r"a file a\\xff\.csv, whose name is not UTF-8"):
            files.names(0)
    os.rename(odd, tmp_path / "a.csv")
    assert files.names(0) == ["a.csv"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(DataError, match=r"loop, which cannot be read: Too many levels"):
        Listing(tmp_path / "loop", 1).names(0)
