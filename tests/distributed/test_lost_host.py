"""A host that is lost is named within five seconds; a process that is stopped is waited for."""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.lab import Lab, obstacle
from launched_team import wait_until

from pibroch.wire.secret import new_secret

pytestmark = [
    pytest.mark.alone,  # a lab
    pytest.mark.skipif(obstacle() is not None, reason="needs a lab"),
]

HERE = Path(__file__).parent
PROGRAM = [sys.executable, str(HERE / "lost_host_program.py")]
OWN_PROGRAMS = {
    "bounded_lag": ["bls_program.py", "3", "auto", str(10**9)],
    "retrieve": ["retrieve_program.py"],
}
"""Programs that know only torch's process group."""
RATE = "100mbit"  # by which the calls take 9 s each way
NAMED_WITHIN_S = 5.0
STOPPED_S = 20.0


@contextmanager
def running(command, is_ready, rate):
    """Both processes once they are ready; and their lines as they come, with the time."""
    lines = []

    def take(rank, line):
        lines.append((time.monotonic(), f"{rank} {line}"))

    def run():
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        # who names the other one first stays, as a launcher ends all when one of them ends
        environment = {"PIBROCH_RPC_SECRET": new_secret(), "PYTHONPATH": path, "LINGER_S": "20"}
        return lab.run(command, environment, timeout_s=90, say=take)

    with Lab(hosts=2, rate=rate) as lab, ThreadPoolExecutor(1) as threads:
        result = threads.submit(run)
        wait_until(lambda: all(has(lines, text) for text in is_ready) or result.done(), 60)
        time.sleep(1.0)
        assert not result.done(), lines
        yield lab.network, lines, result


def with_calls():
    """Ranks that are workers, too, with large messages under way."""
    return running(PROGRAM, ["0 under way"], RATE)


def has(lines, text):
    return any(line.startswith(text) for _, line in lines)


def test_a_process_that_is_stopped_in_the_midst_of_large_messages_is_waited_for():
    """It takes one message and sends the other."""
    with with_calls() as (_, lines, result):
        (pid,) = (int(line.split()[-1]) for _, line in lines if line.startswith("1 pid"))
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(STOPPED_S)
            assert not has(lines, "0 answered"), "it was stopped too late to tell"
        finally:
            os.kill(pid, signal.SIGCONT)
        ended = result.result(90)
    assert ended.exit_codes == (0, 0), lines
    assert has(lines, "0 answered") and has(lines, "0 ended") and has(lines, "1 ended")


def test_a_lost_host_is_named_by_ranks_and_workers_on_both_sides():
    expected = ["0 call WorkerLostError", "0 worker worker1", "1 worker worker0"]
    expected += ["0 rank got rank 1 failed in step ", "1 rank got rank 0 failed in step "]
    with with_calls() as (network, lines, _):
        network.plug(1, is_in=False)
        began = time.monotonic()
        wait_until(lambda: all(has(lines, text) for text in expected), 30)
        pids = [int(line.split()[-1]) for _, line in lines if " pid " in line]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    named = {
        text: min(at for at, line in lines if line.startswith(text)) - began for text in expected
    }
    assert max(named.values()) <= NAMED_WITHIN_S, named
    reasons = [line for _, line in lines if "failed in step" in line]
    assert all("its host was lost" in line for line in reasons), reasons


@pytest.mark.parametrize("name", OWN_PROGRAMS)
def test_programs_of_ones_own_wait_for_who_is_stopped_and_name_a_lost_host(name):
    program, *arguments = OWN_PROGRAMS[name]
    command = [sys.executable, str(HERE / program), *arguments]
    with running(command, ["0 running", "1 running"], None) as (network, lines, result):
        pids = {line[0]: int(line.split()[-1]) for _, line in lines if " running " in line}
        os.kill(pids["1"], signal.SIGSTOP)
        try:
            time.sleep(STOPPED_S)
        finally:
            os.kill(pids["1"], signal.SIGCONT)
        time.sleep(2.0)
        assert not has(lines, "0 named") and not has(lines, "1 named") and not result.done(), lines
        network.plug(1, is_in=False)
        began = time.monotonic()
        wait_until(lambda: all(has(lines, text) for text in ("0 named 1", "1 named 0")), 20)
        named = [at - began for at, line in lines if " named " in line]
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
    assert max(named) <= NAMED_WITHIN_S, lines
