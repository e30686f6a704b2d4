"""Real forks of a small program: who is started again, and which death ends them all."""

import json
import os
import subprocess
import sys

import msgspec
import pytest

from pibroch.forkserver import can_fork
from pibroch.launch.job import Group, Job, Restarts

pytestmark = pytest.mark.skipif(not can_fork(), reason="processes are forked on Linux only")
PROGRAM = """
import json, os, signal, socket, sys, time
from pathlib import Path
import msgspec
from pibroch.forkserver import ForkServer
from pibroch.launch.job import Job
from pibroch.launch.life import Life
from pibroch.launch.machines import Here, place_here

folder = Path(sys.argv[2])

def child():
    what, *numbers = sys.argv[1:]
    with (folder / "starts").open("a") as starts:
        print(what, file=starts)
    if what == "listens":
        (folder / "config.toml").touch()
        host, port = os.environ["PIBROCH_RENDEZVOUS"].removeprefix("tcp://").split(":")
        with socket.create_server((host, int(port))):
            while not (folder / "visited").exists():
                time.sleep(0.01)
        sys.exit(0)
    if what == "visits":
        (folder / "visited").touch()
        print("was there", flush=True)
        time.sleep(60)
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "saves":  # when it is told to end, what a server has; which takes longer than 0 s
        def save(*_):
            time.sleep(0.3)
            port = int((folder / "served").read_text())
            with socket.create_connection(("127.0.0.1", port), 1):
                (folder / "saved").touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        (folder / "begun").touch()
        time.sleep(60)
    if what == "serves":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            (folder / "served").write_text(str(listener.getsockname()[1]))
            time.sleep(60)
    if what == "fails":
        sys.exit(3)
    if what == "stays":
        while (folder / "starts").read_text().count("dies") < int(numbers[0]):
            time.sleep(0.01)
        time.sleep(0.2)
        sys.exit(0)

job = msgspec.json.decode(sys.argv[1], type=Job)
restarts = []
def note(death):
    restarts.append(str(death))
with (
    ForkServer(child, lambda: iter(())) as server,
    Life(job, place_here(), Here(server), on_restart=note) as life,
):
    death = life.wait(lambda: (folder / "begun").exists() and (folder / "served").exists())
    if death is None and (folder / "begun").exists():
        life.end()
print(json.dumps([str(death), restarts]))
"""


def rank(*command):
    return Group("trainer", "rank", 1, command, are_ranks=True)


def beside(*command, **more):
    return Group("helper", "helper", 1, command, **more)


@pytest.fixture
def launched(tmp_path):
    """The death that ended a job, and reasons of restarts."""

    def launch(*groups):
        job = msgspec.json.encode(Job(groups, str(tmp_path))).decode()
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, job, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert ran.returncode == 0, ran.stderr
        death, restarts = json.loads(ran.stdout)
        return death, restarts

    return launch


def starts(folder):
    return (folder / "starts").read_text().split()


def test_who_needs_the_ranks_starts_when_they_listen_and_ends_with_them(launched, tmp_path):
    needs = beside("visits", needs=("trainer",), logs="helpers", restarts=None)
    assert launched(needs, rank("listens")) == ("None", [])
    assert starts(tmp_path) == ["listens", "visits"]
    assert (tmp_path / "helpers" / "0.log").read_text() == "was there\n"


def test_one_that_dies_is_started_again_alone_so_many_times(launched, tmp_path):
    death, restarts = launched(rank("stays", "99"), beside("dies", restarts=Restarts(2)))
    assert death == "helper 0 ended with signal SIGKILL" and restarts == [death] * 2
    assert starts(tmp_path).count("dies") == 3


def test_the_others_go_on_without_one_that_may_be_missed(launched, tmp_path):
    death, restarts = launched(
        rank("stays", "3"), beside("dies", restarts=Restarts(2, or_without=True))
    )
    assert death == "None" and len(restarts) == 2 and starts(tmp_path).count("dies") == 3


def test_who_cannot_be_started_again_alone_ends_all(launched):
    assert launched(rank("stays", "99"), beside("dies")) == (
        "helper 0 ended with signal SIGKILL",
        [],
    )


@pytest.mark.parametrize("after_any_end", [False, True])
def test_a_failure_is_no_loss_unless_the_job_says_so(launched, tmp_path, after_any_end):
    restarts = Restarts(1, after_any_end=after_any_end)
    death, reasons = launched(rank("stays", "99"), beside("fails", restarts=restarts))
    assert death == "helper 0 ended with exit code 3"
    assert reasons == [death] * after_any_end
    assert starts(tmp_path).count("fails") == 1 + after_any_end


def test_a_launcher_of_ones_own_gets_the_job(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from pibroch.launch.base import Launcher\n"
        "class Counting(Launcher):\n"
        "    def run(self, run):\n"
        "        job = run.job(is_here=False)\n"
        "        run.say(f'{job.num_ranks} ranks of {job.folder}')\n"
        "        return 7\n"
    )
    command = ["-m", "pibroch", "train", "--ranks", "3", "--run-dir", "a"]
    ran = subprocess.run(
        [sys.executable, *command, "--launcher", "mine:Counting"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert ran.returncode == 7 and ran.stderr == "3 ranks of a\n", ran.stderr


def test_ranks_that_are_told_to_end_have_their_servers_until_they_have(launched, tmp_path):
    launched(rank("saves"), beside("serves"))
    assert (tmp_path / "saved").exists()
