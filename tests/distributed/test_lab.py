"""The lab with real namespaces; skipped, with the reason, where none can be made."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.lab import Lab, LabError, Network, obstacle, processes, sweep
from benchmarks.lab.network import labs

from pibroch.errors import ConfigError
from pibroch.ports import free_port

CHECKOUT = Path(__file__).resolve().parents[2]

HINDRANCE = obstacle()
pytestmark = [
    pytest.mark.alone,  # looks at all labs of this machine, and times on their links
    pytest.mark.skipif(HINDRANCE is not None, reason=f"no lab here: {HINDRANCE}"),
]

TIMEOUT_S = 240
RECEIVE = """
import os, socket, time
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        connection, _ = server.accept()
    start, received = time.monotonic(), 0
    while chunk := connection.recv(1 << 20):
        received += len(chunk)
    print(received, time.monotonic() - start)
else:
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    connection.sendall(bytes(4_000_000))
"""


def python(program):
    return [sys.executable, "-c", program]


def lab_command(*arguments):
    return [sys.executable, "-m", "benchmarks.lab", *arguments]


def command_line(*arguments, **environment):
    return subprocess.run(
        lab_command(*arguments),
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | environment,
    )


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_each_rank_has_its_place_and_its_host():
    show = (
        "import json, os, socket; print(json.dumps([dict(os.environ), [i[1] for i in"
        " socket.if_nameindex()]]))"
    )
    with Lab(hosts=2, ranks_per_host=2, threads=3) as lab:
        outputs = lab.run(python(show), env={"MINE": "x"}, timeout_s=TIMEOUT_S).check().outputs
        inside = {os.readlink("/proc/self/ns/net")}
        again = lab.run(["readlink", "/proc/self/ns/net"], timeout_s=TIMEOUT_S).check().outputs
    shown = [json.loads(output) for output in outputs]
    places = [
        [env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
        for env, _ in shown
    ]
    assert places == [
        ["0", "0", "4", "2"],
        ["1", "1", "4", "2"],
        ["2", "0", "4", "2"],
        ["3", "1", "4", "2"],
    ]
    assert {(env["MASTER_ADDR"], env["OMP_NUM_THREADS"], env["MINE"]) for env, _ in shown} == {
        ("10.77.0.1", "3", "x")
    }
    assert all(set(interfaces) == {"lo", env["GLOO_SOCKET_IFNAME"]} for env, interfaces in shown)
    assert again[0] == again[1] != again[2] == again[3]
    assert not inside & {output.strip() for output in again}


def test_a_link_is_as_slow_as_asked_and_its_bytes_are_counted():
    with Lab(hosts=2, rate="50mbit") as lab:
        slow = lab.run(python(RECEIVE), timeout_s=TIMEOUT_S).check()
        lab.network.shape(None)
        quick = lab.run(python(RECEIVE), timeout_s=TIMEOUT_S).check()
    (received, slow_s), (_, quick_s) = (
        tuple(map(float, run.outputs[0].split())) for run in (slow, quick)
    )
    assert received == 4_000_000
    assert slow_s > 0.9 * (received - 300_000) * 8 / 50e6, "faster than the link, its bucket aside"
    assert quick_s < slow_s / 2
    for run in (slow, quick):
        assert 4_000_000 < run.links[1].sent < 4_400_000
        assert run.links[0].received == pytest.approx(run.links[1].sent, abs=2000)
        assert run.links[0].sent < 400_000


def test_one_failure_ends_all_and_is_named():
    program = (
        "import os, time\nif os.environ['RANK'] == '1': print('lost'); raise"
        " SystemExit(7)\ntime.sleep(1000)"
    )
    with Lab(hosts=3) as lab:
        result = lab.run(python(program), timeout_s=TIMEOUT_S)
        assert lab.network.pids() == []
    assert (result.first_failed, result.exit_codes) == (1, (-signal.SIGTERM, 7, -signal.SIGTERM))
    assert result.seconds < TIMEOUT_S / 2
    with pytest.raises(LabError, match="exit code 7 from rank 1: lost"):
        result.check()


def test_time_is_limited_also_for_children_that_ignore_signals(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    program = "trap '' TERM; sleep 1000 & echo started; wait; wait"
    with Lab(hosts=1) as lab:
        start = time.monotonic()
        result = lab.run(["bash", "-c", program], timeout_s=0.3, logs=tmp_path)
        assert lab.network.pids() == []
    assert result.timed_out
    assert time.monotonic() - start < 20
    assert (tmp_path / "rank0.log").read_text() == "started\n"
    with pytest.raises(LabError, match="no end after"):
        result.check()


def test_nothing_stays_behind_after_an_error():
    with pytest.raises(ZeroDivisionError), Lab(hosts=2) as lab:
        name = lab.network.name
        subprocess.Popen([*lab.launcher(1), "sleep", "1000"])
        wait_until(lab.network.pids)
        (pid,) = lab.network.pids()
        raise ZeroDivisionError
    assert name not in labs()
    wait_until(lambda: not lives(pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_lab_takes_everything_with_it(number):
    run = lab_command(
        "run",
        "--hosts",
        "2",
        "--timeout",
        str(TIMEOUT_S),
        "--",
        "bash",
        "-c",
        "echo $$; sleep 1000",
    )
    with Lab(hosts=1) as other, started(run) as owner:
        pids = [int(owner.stdout.readline().split()[1]) for _ in range(2)]
        (name,) = (name for name in labs() if name.startswith(f"{owner.pid}."))
        assert all(lives(pid) for pid in pids)
        owner.send_signal(number)
        owner.wait(TIMEOUT_S)
        if number == signal.SIGKILL:
            wait_until(lambda: not any(lives(pid) for pid in pids))
            sweep()
        assert not any(lives(pid) for pid in pids)
        assert name not in labs(), "removed"
        assert other.network.name in labs(), "the lab of a living process stays"


@contextmanager
def started(command):
    process = subprocess.Popen(
        command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_standing_lab_outlives_its_maker_until_it_is_taken_down():
    up = command_line("up", "--hosts", "2", "--rate", "1gbit")
    name = up.stdout.strip()
    try:
        assert up.returncode == 0, up.stderr
        assert name not in sweep()
        done = command_line(
            "run", "--lab", name, "--ranks-per-host", "2", "--", "bash", "-c", "echo hello $RANK"
        )
        assert sorted(done.stdout.splitlines()) == [f"[{rank}] hello {rank}" for rank in range(4)]
        assert "host 1: " in done.stderr
        failed = command_line("run", "--lab", name, "--", "false")
        assert failed.returncode == 1
        assert "exit code 1 from rank" in failed.stderr
        assert name in labs()
    finally:
        down = command_line("down", name)
    assert down.returncode == 0
    assert name not in labs()
    assert "one" in command_line("down", name).stderr


def test_two_hosts_end_with_the_bits_of_two_ranks_on_loopback():
    program = [sys.executable, str(Path(__file__).with_name("lab_training.py"))]
    with Lab(hosts=2, rate="200mbit") as lab:
        run = lab.run(program, timeout_s=TIMEOUT_S).check()
    assert all(link.sent > 20_000 for link in run.links), "it went over the links"
    apart = [hash_of(output, "10.77.0.1") for output in run.outputs]
    together = [hash_of(output, "127.0.0.1") for output in on_loopback(program, 2)]
    assert apart == together
    assert apart[0] != apart[1], "the ranks hold different rows"


def on_loopback(program, world_size):
    """Outputs of the ranks as processes of this host, without a lab."""
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
    }
    environments = [os.environ | place | {"RANK": str(rank)} for rank in range(world_size)]
    ranks = [
        subprocess.Popen(
            program, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for env in environments
    ]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * world_size, outputs
    return [output for output, _ in outputs]


def hash_of(output, address):
    (line,) = (line for line in output.splitlines() if line.startswith("hash "))
    assert line.endswith(address)
    return line.split()[1]


def test_what_is_missing_is_named(tmp_path):
    done = command_line("up", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "apt-get install iproute2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("hosts", "rate"), [(0, None), (2, "fast"), (2, "0mbit"), (2, "200 mbit")])
def test_a_lab_that_makes_no_sense_is_refused(hosts, rate):
    before = set(labs())
    with pytest.raises(ConfigError):
        Network.build(hosts, rate)
    assert set(labs()) == before
