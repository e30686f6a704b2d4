"""Real forks of a small program.

What they are like, what they may ask for, and what ends with whom.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pibroch.forkserver import can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="processes are forked on Linux only")
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from pibroch.forkserver import ForkServer, link_to_server

def child():
    what, folder = sys.argv[1], Path(os.environ["FOLDER"])
    link = link_to_server()
    if what == "tell":
        name = Path("/proc/self/comm").read_text().strip()
        descriptors = sorted(int(each) for each in os.listdir("/proc/self/fd"))
        state = [sys.argv[1:], sorted(os.environ), name, len(descriptors), sys.stdin.read()]
        (folder / "told").write_text(json.dumps(state))
        sys.exit(7)
    if what == "keep":
        found = link.keep("rows", sys.argv[2], int(sys.argv[3]))
        state = [found.is_new, found.memory[0], len(found.memory)]
        (folder / sys.argv[4]).write_text(json.dumps(state))
        found.memory[0] = 42
        none = link.kept("nothing")
        assert none is None
        sys.exit(0)
    if what == "owner":
        started = link.start(["role", "--number", "3"], dict(os.environ), folder / "log")
        assert started.stdout.readline() == b"ready\\n"
        (folder / "pid").write_text(str(started.pid))
        assert started.poll() is None
        if sys.argv[2] == "asks":
            started.stdin.close()
            assert started.wait(10) == 5
            (folder / "asked").write_text("")
        time.sleep(60)
    if what == "role":
        print("ready", flush=True)
        print("said", file=sys.stderr, flush=True)
        sys.stdin.buffer.read()
        if os.environ.get("STAYS"):
            time.sleep(60)
        sys.exit(5)

with ForkServer(child, lambda: iter(())) as server:
    for line in sys.stdin:
        arguments = json.loads(line)
        variables = {name: os.environ.get(name, "") for name in ("FOLDER", "STAYS")}
        process = server.fork(arguments, variables, "a name for it")
        while process.poll() is None:
            server.serve(0.01)
            wanted = Path(os.environ["FOLDER"], "kill")
            if wanted.exists():
                wanted.unlink()
                process.kill()
        server.serve(0.2)
        print(process.poll(), flush=True)
"""


@pytest.fixture
def serving(tmp_path):
    """Ask for a child, get its exit code."""

    def start(**variables):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "FOLDER": str(tmp_path), **variables},
        )
        started.append(process)
        return process

    started = []
    yield start
    for process in started:
        process.kill()
        process.communicate()


def ask(process, *arguments):
    process.stdin.write(json.dumps(arguments) + "\n")
    process.stdin.flush()


def wait_for(path):
    deadline = time.monotonic() + 20
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)
    return path.read_text()


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_fork_is_what_a_started_program_would_be(serving, tmp_path):
    process = serving()
    ask(process, "tell", "a", "b c")
    assert process.stdout.readline() == "7\n"
    arguments, variables, name, num_descriptors, given = json.loads((tmp_path / "told").read_text())
    assert (arguments, name, given) == (["tell", "a", "b c"], "a name for it", "")
    assert variables == ["FOLDER", "STAYS"]
    assert num_descriptors <= 3 + 1 + 2, "its streams, the folder that it lists, and its link"


def test_memory_outlives_the_process_that_asked_for_it(serving, tmp_path):
    process = serving()
    found = []
    for number, (tag, num_bytes) in enumerate([("a", 5000), ("a", 5000), ("b", 5000), ("b", 9000)]):
        ask(process, "keep", tag, str(num_bytes), f"kept{number}")
        assert process.stdout.readline() == "0\n"
        found.append(json.loads((tmp_path / f"kept{number}").read_text()))
    assert found == [[True, 0, 5000], [False, 42, 5000], [True, 0, 5000], [True, 0, 9000]]


def test_what_a_child_starts_speaks_to_it_and_logs(serving, tmp_path):
    process = serving()
    ask(process, "owner", "asks")
    wait_for(tmp_path / "pid")
    deadline = time.monotonic() + 20
    while not (tmp_path / "asked").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / "asked").exists(), "the exit code was 5, seen by its owner"
    assert (tmp_path / "log").read_text() == "said\n"
    (tmp_path / "kill").touch()
    assert process.stdout.readline() == "-9\n"


@pytest.mark.parametrize("stays", ["", "1"], ids=["ends with its input", "would not end"])
def test_what_a_child_has_started_ends_with_it(serving, tmp_path, stays):
    process = serving(STAYS=stays)
    ask(process, "owner", "waits")
    pid = int(wait_for(tmp_path / "pid"))
    assert lives(pid)
    (tmp_path / "kill").touch()
    assert process.stdout.readline() == f"{-signal.SIGKILL}\n"
    deadline = time.monotonic() + 10
    while lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
