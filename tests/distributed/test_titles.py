"""What the system shows real processes as."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched_team import Team

from pibroch.config import to_toml
from pibroch.ports import free_port
from small_run import make_config, make_dataset, train_here

ROLES = (
    "embedding.exchange=lookahead",
    "embedding.exchange.oracle=central",
    "embedding.exchange.servers=2",
    "data.processors=1",
    "train.epochs=500",
)
OF_A_RUN = {
    "launcher of 2 trainers",
    "trainer 0 of 2",
    "trainer 1 of 2",
    "embedding server 0 of 2",
    "embedding server 1 of 2",
    "oracle",
    "data processor 0 of 1",
}


def families():
    """Parents of all processes."""
    results = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        results[int(stat.parent.name)] = parent
    return results


def shown(first):
    """Command lines of a process and of all that come from it."""
    parents = families()
    pids = [first]
    for pid in pids:
        pids += [child for child, parent in parents.items() if parent == pid]
    return [command_line(pid) for pid in pids]


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_each_process_of_a_run_says_what_it_is(tmp_path):
    recipe = tmp_path / "mine.toml"
    config = make_config(make_dataset(tmp_path / "data"), *ROLES)
    recipe.write_text(to_toml(config.model_dump()))
    program = [sys.executable, "-m", "pibroch"]
    arguments = (recipe, "--run-dir", tmp_path / "run", "--ranks", 2)
    with Team(*arguments, program=program) as team:
        team.wait_for_step(tmp_path / "run", 2)
        assert {f"pibroch: {title} (mine)" for title in OF_A_RUN} == set(shown(team.process.pid))


def test_each_process_of_a_server_says_what_it_is(tmp_path):
    pytest.importorskip("uvicorn", reason="needs the extra serve")
    config = make_config(make_dataset(tmp_path / "data"), "train.steps=5")
    train_here(config, tmp_path / "ctr")
    command = ["-m", "pibroch", "serve", tmp_path / "ctr", "--port", 0, "--workers", 2]
    with subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert " at http" in server.stdout.readline()
            workers = {f"pibroch: serving worker {number} of 2 (ctr)" for number in range(2)}
            launcher = "pibroch: launcher of 2 serving workers (ctr)"
            assert set(shown(server.pid)) == {launcher, *workers}
        finally:
            server.kill()


def test_a_role_on_its_own_keeps_the_environment_that_it_is_shown_with():
    place = f"tcp://127.0.0.1:{free_port()}"
    command = ["-m", "pibroch", "embedding-server", "--rendezvous", place, "--number", "0"]
    variables = dict(os.environb)
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, env=variables
    ) as server:
        try:
            assert server.stdout.readline().startswith(b"embedding0 is ready")
            assert command_line(server.pid) == "pibroch: embedding server 0"
            assert Path(f"/proc/{server.pid}/comm").read_text() == "embedding-se 0\n"
            lines = Path(f"/proc/{server.pid}/environ").read_bytes().rstrip(b"\0").split(b"\0")
            assert dict(line.split(b"=", 1) for line in lines) == variables
        finally:
            server.kill()


def test_without_setproctitle_the_short_name_alone_changes():
    program = (
        "import sys; sys.modules['setproctitle'] = None\n"
        "from pibroch.title import show_as; show_as('trainer 1 of 2', 'rank 1')\n"
        "print(open('/proc/self/comm').read(), open('/proc/self/cmdline').read(), sep='')"
    )
    name, shown_as = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split("\n", 1)
    assert name == "rank 1"
    assert shown_as.rstrip("\0\n") == "\0".join([sys.executable, "-c", program])
