"""New versions under load, and the end of a server."""

import http.client
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import pibroch as pb
from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.state.export_format import read_export
from served import Load, ask, serving, until
from small_run import run_command

RELOAD = ("--reload-every", 0.05)


@pytest.fixture(scope="module")
def versions(clicks, tmp_path_factory):
    """Exports of one checkpoint whose scores differ, and those scores by version."""
    folder = tmp_path_factory.mktemp("versions")
    rows = clicks.rows[:24]
    expected = {}
    for dtype in ("float32", "int8", "float16"):
        export_checkpoint(clicks.run, folder / dtype, ExportOptions(dtype))
        predictor = pb.Predictor.open(folder / dtype)
        expected[predictor.version] = predictor.score_raw(rows).numpy()
    some = list(expected.values())
    assert all(
        np.abs(a - b).max() > 2e-5
        for a, b in ((some[0], some[1]), (some[0], some[2]), (some[1], some[2]))
    )
    return SimpleNamespace(folder=folder, rows=rows, expected=expected, run=clicks.run)


def replace(source, out):
    """What ``pibroch export --overwrite`` does at its end: another folder takes the name."""
    fresh = out.with_name("fresh")
    old = out.with_name("old")
    shutil.copytree(source, fresh)
    out.rename(old)
    fresh.rename(out)
    shutil.rmtree(old)


def test_ten_new_versions_under_load(versions, tmp_path):
    out = shutil.copytree(versions.folder / "float32", tmp_path / "ctr")
    with serving(out, *RELOAD) as server, Load(server, versions) as load:
        load.until_seen(read_export(out).version)
        for number in range(10):
            dtype = ("int8", "float16", "float32")[number % 3]
            replace(versions.folder / dtype, out)
            load.until_seen(read_export(out).version)
        assert (
            server.metric("pibroch_model_loads") == 11
            and server.metric("pibroch_model_load_failures") == 0
        )
    assert not load.failures


def test_the_command_replaces_what_is_served(versions, tmp_path):
    out = shutil.copytree(versions.folder / "float32", tmp_path / "ctr")
    with serving(out, *RELOAD) as server, Load(server, versions, 1) as load:
        ran = run_command("export", versions.run, "--out", out, "--dtype", "int8", "--overwrite")
        assert ran.returncode == 0 and "of float32" in ran.stdout
        load.until_seen(read_export(versions.folder / "int8").version)
    assert not load.failures


def test_a_damaged_version_does_not_take_over(versions, tmp_path):
    out = tmp_path / "ctr"
    shutil.copytree(versions.folder / "float32", out / "1")
    first, second = (read_export(versions.folder / dtype).version for dtype in ("float32", "int8"))
    damaged = shutil.copytree(versions.folder / "int8", tmp_path / "damaged")
    content = bytearray((damaged / "dense.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "dense.safetensors").write_bytes(content)
    with serving(out, *RELOAD) as server, Load(server, versions, 1) as load:
        damaged.rename(out / "2")
        until(lambda: server.metric("pibroch_model_load_failures") == 1)
        load.until_seen(first)
        fine = shutil.copytree(versions.folder / "int8", tmp_path / "fine")
        fine.rename(out / "10")  # numbers, not names, are compared
        load.until_seen(second)
        assert server.ask("GET", f"/v2/models/ctr/versions/{second}/ready").status == 200
        assert server.ask("GET", f"/v2/models/ctr/versions/{first}/ready").status == 404
        assert not load.failures
        load.__exit__()
        assert "dense.safetensors" in server.end()


def test_sigterm_lets_open_requests_end(versions):
    """A request that waits for its batch when the signal comes is answered; then nobody listens."""
    results = []
    with serving(versions.folder / "int8", "--batch-delay-ms", 1000) as server:
        idle = server.connect()
        ask(idle, "GET", "/v2/health/live")
        waiting = threading.Thread(
            target=lambda: results.append(server.ask("POST", "/score", {"rows": versions.rows}))
        )
        waiting.start()
        until(lambda: server.metric("pibroch_rows_waiting") == len(versions.rows))
        output = server.end()
        waiting.join(60)
        assert results[0].status == 200 and "1 requests open" in output
        with pytest.raises(OSError):
            server.connect().connect()
        idle.close()


def test_sigterm_under_load_while_it_drains(versions):
    with serving(versions.folder / "int8", "--drain", 1) as server:
        answers = []
        failures = []
        stop = threading.Event()

        def client():
            while not stop.is_set():
                try:
                    answers.append(server.ask("POST", "/score", {"rows": versions.rows[:1]}))
                except (OSError, http.client.HTTPException) as error:
                    failures.append(error)
                    return

        threads = [threading.Thread(target=client) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: len(answers) > 20)
        os.kill(server.program.pid, signal.SIGTERM)
        until(lambda: server.ask("GET", "/v2/health/ready").status == 503)
        draining = len(answers)
        until(lambda: len(answers) > draining + 20)
        assert not failures and answers[-1].headers["connection"] == "close"
        stop.set()
        for thread in threads:
            thread.join(60)
        assert server.program.end(60).returncode == 0
        assert not failures and all(answer.status == 200 for answer in answers)


def test_what_cannot_be_served(versions, tmp_path):
    with serving(versions.folder / "int8") as server:
        ran = run_command("serve", versions.folder / "int8", "--port", server.address[1])
        assert ran.returncode == 2 and "--port 0" in ran.stderr
    ran = run_command("serve", tmp_path)
    assert ran.returncode == 2 and "checkpoint" in ran.stderr


def test_without_the_extra(monkeypatch):
    from pibroch.cli import serve as command

    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(pb.errors.MissingDependencyError, match=r"pibroch\[serve\]"):
        command.serve()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_workers_share_a_port_and_its_counters(versions, tmp_path):
    """Two processes answer; one that is killed is started again; all end together."""
    out = shutil.copytree(versions.folder / "float32", tmp_path / "ctr")
    with serving(out, "--workers", 2, *RELOAD) as server:
        workers = children(server.program.pid)
        assert len(workers) == 2
        pages = [
            int(re.search(r"^Pss: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)[1])
            for pid in workers
        ]
        assert max(pages) < 250_000  # kB
        with Load(server, versions, 4) as load:
            load.until_seen(read_export(out).version)
            replace(versions.folder / "int8", out)
            load.until_seen(read_export(out).version)
        assert not load.failures
        counted = 'pibroch_requests_total{endpoint="score",status="200"}'
        until(lambda: server.metric(counted) == len(load.seen))  # counted once it is answered
        assert [server.metric(counted) for _ in range(12)] == [
            len(load.seen)
        ] * 12  # whichever of them is asked
        os.kill(workers[0], signal.SIGKILL)
        until(lambda: len(set(children(server.program.pid)) - {workers[0]}) == 2)
        assert server.ask("POST", "/score", {"rows": versions.rows}).status == 200
        assert "started again" in server.end()
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_worker_that_is_stopped_is_started_again(versions):
    """The kernel would go on to give it connections, which nobody answers."""
    options = ("--workers", 2, "--worker-timeout", 2)
    with serving(versions.folder / "float32", *options) as server:
        stopped = children(server.program.pid)[0]
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: len(set(children(server.program.pid)) - {stopped}) == 2)
        for _ in range(10):
            until(lambda: server.ask("GET", "/v2/health/ready").status == 200)
        assert "hangs and is killed" in server.complaints()
        os.kill(server.program.pid, signal.SIGSTOP)  # nor is the one that looks after them to blame
        os.kill(server.program.pid, signal.SIGCONT)
        before = set(children(server.program.pid))
        assert server.ask("POST", "/score", {"rows": versions.rows}).status == 200
        assert set(children(server.program.pid)) == before
        server.end()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_worker_that_ends_again_and_again_ends_them_all(versions):
    """Each has its own restarts: the other one, killed before, uses up none of them."""
    with serving(versions.folder / "float32", "--workers", 2) as server:
        for number in range(6):
            before = children(server.program.pid)
            victim = before[0] if number < 2 else before[-1]  # the first, then the other's line
            os.kill(victim, signal.SIGKILL)
            until(lambda: set(children(server.program.pid)) - set(before))  # noqa: B023
        os.kill(children(server.program.pid)[-1], signal.SIGKILL)
        ended = server.program.end()
    assert ended.returncode == 1, ended.stderr
    assert "workers that end again and again, the last with signal SIGKILL" in ended.stderr


def children(pid):
    """Processes that a process has started and that still run."""
    result = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in result if "pibroch" in Path(f"/proc/{child}/cmdline").read_text()]
