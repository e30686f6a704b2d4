"""Tables that memory has no room for: an error in words, before the system ends the process."""

import subprocess
import sys

import pytest

import pibroch as pb
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.embedding import MemoryShard, Piece
from pibroch.errors import ConfigError
from pibroch.servers.spec import ShardSpec
from pibroch.wire.segments import OwnSegment

LARGE = pb.Table("clicks", num_rows=3_000_000_000_000, dim=16)
"""192 TB."""


@pytest.mark.parametrize("rows", [3_000_000_000_000, 1 << 60])
def test_more_rows_than_memory_are_refused_in_words(rows):
    with pytest.raises(ConfigError) as caught:
        pb.Embeddings([pb.Table("clicks", num_rows=rows, dim=16)], pb.SGD(lr=1.0))
    error = caught.value
    assert f"{rows:,} rows of 64 bytes" in error.got and "clicks" in error.got
    assert "GB of memory" in error.need
    assert "more ranks or embedding servers" in error.do and "smaller dim" in error.do


def test_servers_say_so_too():
    pieces = [Piece(LARGE, range(LARGE.num_rows), range(16))]
    spec = ShardSpec.of(pieces, pb.Adagrad(lr=0.1), seed=0)
    with pytest.raises(ConfigError, match="rows of 128 bytes"):
        spec.build(16, {})


def shared(num_rows, width):
    return OwnSegment.create(num_rows * width * 4).array


@pytest.mark.parametrize("make_room", [None, shared])
def test_room_that_the_system_refuses_is_named(make_room):
    """Room that takes no memory until it is used is asked of the system alone."""
    table = pb.Table("clicks", num_rows=4, dim=16)
    given = {} if make_room is None else {"make_room": make_room}
    with pytest.raises(ConfigError, match=r"rows of 64 bytes .* of clicks in one process"):
        MemoryShard(
            [Piece(table, range(4), range(16))],
            16,
            pb.SGD(lr=1.0),
            None,
            spare_rows=1 << 55,
            **given,
        )


LIMITED = """
import resource, pibroch as pb
from pathlib import Path
pb.Embeddings([pb.Table("clicks", 4, 16)], pb.SGD(lr=1.0))  # loads all that is needed
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (64 << 20), -1))
try:
    pb.Embeddings([pb.Table("clicks", 4_000_000, 16)], pb.SGD(lr=1.0))
except pb.errors.ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process as Linux does")
def test_a_limit_of_the_process_counts():
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120, check=True
    )
    assert "4,000,000 rows of 64 bytes" in done.stdout and "need 0.3 GB of memory" in done.stdout


def limit_memory():
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, -1))


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process as Linux does")
def test_the_command_line_says_that_memory_is_short(tmp_path):
    """What asks for much elsewhere: here a profile of a hashed feature's rows, 34 GB."""
    clicks = tmp_path / "clicks.csv"
    clicks.write_text("y,a\n" + "1,x\n0,y\n" * 20)
    schema = Schema.from_toml(
        'label = "y"\n[categorical.a]\nencoding = "hash"\nnum_buckets = 2_147_483_000\n'
    )
    prepare([TextSource(clicks, ",", True)], schema, tmp_path / "data", PrepareOptions())
    paths = "--data", str(tmp_path / "data"), "--out", str(tmp_path / "plan")
    done = subprocess.run(
        [sys.executable, "-m", "pibroch", "plan", "--shards", "2", *paths],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limit_memory,
    )
    assert done.returncode == 1
    assert "no memory left" in done.stderr and "fewer rows" in done.stderr
    assert "bug in pibroch" not in done.stderr
