"""Real forks of a small program.

What they are like, and what they may ask for.
"""

import json
import os
import subprocess
import sys

import pytest

from pibroch.forkserver import ForkServer, can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="processes are forked on Linux only")
PROGRAM = """
import json, os, sys
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
    if what == "speak":
        print("output", flush=True)
        print("errors", file=sys.stderr, flush=True)
        print("leads", os.getsid(0) == os.getpid(), flush=True)
        sys.exit(0)

with ForkServer(child, lambda: iter(())) as server:
    for line in sys.stdin:
        arguments = json.loads(line)
        log = os.open(arguments[2], os.O_WRONLY | os.O_CREAT) if "log" in arguments else None
        variables = {"FOLDER": os.environ["FOLDER"]}
        process = server.fork(arguments, variables, "a name for it", log)
        while process.poll() is None:
            server.serve(0.01)
        server.serve(0.2)
        print(process.poll(), flush=True)
"""


@pytest.fixture
def serving(tmp_path):
    """Ask for a child, get its exit code."""

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "FOLDER": str(tmp_path)},
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


def test_a_fork_is_what_a_started_program_would_be(serving, tmp_path):
    process = serving()
    ask(process, "tell", "a", "b c")
    assert process.stdout.readline() == "7\n"
    arguments, variables, name, num_descriptors, given = json.loads((tmp_path / "told").read_text())
    assert (arguments, name, given) == (["tell", "a", "b c"], "a name for it", "")
    assert variables == ["FOLDER"]
    assert num_descriptors <= 3 + 1 + 2, "its streams, the folder that it lists, and its link"


def test_a_module_that_cannot_be_imported_is_said_and_left_to_the_child(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "raises_its_own.py").write_text("raise ZeroDivisionError('of its own')")
    (tmp_path / "comes_after.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with ForkServer(sys.exit, lambda: iter(())) as server, caplog.at_level("DEBUG", "pibroch"):
        server.preload(["nothing_such", "raises_its_own", "comes_after"])
    assert "comes_after" in sys.modules
    first, second = caplog.messages
    assert "nothing_such is not loaded" in first and "ModuleNotFoundError" in first
    assert "raises_its_own is not loaded" in second and "of its own" in second


def test_memory_outlives_the_process_that_asked_for_it(serving, tmp_path):
    process = serving()
    found = []
    for number, (tag, num_bytes) in enumerate([("a", 5000), ("a", 5000), ("b", 5000), ("b", 9000)]):
        ask(process, "keep", tag, str(num_bytes), f"kept{number}")
        assert process.stdout.readline() == "0\n"
        found.append(json.loads((tmp_path / f"kept{number}").read_text()))
    assert found == [[True, 0, 5000], [False, 42, 5000], [True, 0, 5000], [True, 0, 9000]]


def test_a_child_with_a_log_speaks_there_and_hears_no_terminal(serving, tmp_path):
    process = serving()
    ask(process, "speak", "log", str(tmp_path / "log"))
    assert process.stdout.readline() == "0\n"
    assert (tmp_path / "log").read_text() == "output\nerrors\nleads True\n"
