"""The topic on serving: what it makes of rounds, its case, and that the plain server gives the scores of ours."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.http_load import HttpServer, find_wrk, plain_server, run_load, serve_command
from benchmarks.serving_case import make_case
from benchmarks.topics import serving

from pibroch.errors import MissingDependencyError


def test_ratios_are_of_rounds():
    found = {"pibroch": [30.0, 80.0, 33.0], serving.FASTAPI: [10.0, 20.0, 10.0]}
    turns = {
        label: [{"requests_per_second": value, "failed": 1} for value in values] for label, values in found.items()
    }
    ours, theirs = serving._rows_of(turns, 1, 8)
    assert (ours["over_fastapi"], ours["least_over_fastapi"], ours["most_over_fastapi"]) == (3.3, 3.0, 4.0)
    assert theirs["over_fastapi"] == 1 and ours["failed"] == 3 and ours["requests_per_second"] == 33


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
            found = run_load(ours, [case.body(number, 2) for number in range(3)], 2, 1)
            assert found.requests > 0 and found.failed == 0 and 0 < found.p50_ms <= found.p99_ms <= found.p999_ms
            assert run_load(ours, [b"{"], 1, 1).failed > 0
