"""The topic on serving: its rounds and its case, and a plain server with our scores."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks import serving_hosts
from benchmarks.http_load import (
    HttpServer,
    LoadResult,
    find_wrk,
    plain_server,
    run_load,
    serve_command,
)
from benchmarks.serving_case import make_case
from benchmarks.topics import serving

from pibroch.errors import MissingDependencyError


def test_ratios_are_of_rounds():
    result = {"pibroch": [30.0, 80.0, 33.0], serving.FASTAPI: [10.0, 20.0, 10.0]}
    turns = {
        label: [{"requests_per_second": value, "failed": 1} for value in values]
        for label, values in result.items()
    }
    ours, other = serving._rows_of(turns, 1, 8)
    assert (ours["over_fastapi"], ours["least_over_fastapi"], ours["most_over_fastapi"]) == (
        3.3,
        3.0,
        4.0,
    )
    assert other["over_fastapi"] == 1 and ours["failed"] == 3 and ours["requests_per_second"] == 33


MAPS = """
import mmap, os, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
done, begun = os.pipe()
child = os.fork()
read = sum(mapped[place] for place in range(0, len(mapped), 4096))
if child:
    os.read(done, 1)
    print(child, flush=True)
else:
    os.write(begun, b"x")
sys.stdin.read()
"""


def test_memory_of_workers_counts_what_they_share_once(tmp_path):
    """Two processes that have read all of one mapped file: its pages are in the sum, and once."""
    size = 64 << 20
    file = tmp_path / "tables"
    file.write_bytes(bytes(size))
    command = [sys.executable, "-S", "-c", MAPS, file]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        second = int(first.stdout.readline())
        shares = [serving._proportional_bytes(pid) for pid in (first.pid, second)]
        first.stdin.close()
    assert size <= sum(shares) < 1.5 * size and max(shares) < size


def test_hosts_are_compared_round_by_round():
    def loads(*times):
        return [LoadResult(10, 1.0, time, 2 * time, 3 * time, 0, 0.0) for time in times]

    one, two = serving_hosts._rows_of(
        {serving_hosts.ONE: loads(2.0, 4.0, 2.0), serving_hosts.TWO: loads(3.0, 4.0, 4.0)},
        "1gbit",
        1,
        8,
    )
    assert two["over_one_host"] == 1.5 and one["over_one_host"] == 1
    assert (two["least_over_one_host"], two["most_over_one_host"]) == (1.0, 2.0)


def test_without_the_generator(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingDependencyError, match="apt-get install wrk"):
        find_wrk()


def test_servers_agree_and_bear_load(tmp_path):
    case = make_case(tmp_path, 1500, 200, steps=2, checkpoint_every=1)
    assert len(case.checkpoints) == 2 and len(case.rows) == 1500
    command = serve_command(case.int8)
    with (
        HttpServer("ours", command) as ours,
        plain_server(serving.FASTAPI, Path(sys.executable), case.float32, "torch") as plain,
    ):
        for server in (ours, plain):
            serving._check_scores(server, case)
            scores = np.array(serving.ask(server.url, case.body(1, 7))["scores"])
            assert np.abs(scores - np.array(case.scores[7:14])).max() < 0.02
        if shutil.which("wrk"):
            result = run_load(ours, [case.body(number, 2) for number in range(3)], 2, 1)
            assert (
                result.requests > 0
                and result.failed == 0
                and 0 < result.p50_ms <= result.p99_ms <= result.p999_ms
            )
            assert run_load(ours, [b"{"], 1, 1).failed > 0
