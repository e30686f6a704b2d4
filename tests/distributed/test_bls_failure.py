"""Programs over bounded lag end.

All of them when they are done, the others when one of them is lost.
"""

import os
import signal
import time
from pathlib import Path

import pytest
from launched_team import wait_until

from forked import Program
from pibroch.ports import free_port

pytestmark = pytest.mark.alone  # times, looks at /dev/shm

HERE = Path(__file__).parent
SECONDS_TO_NOTICE = 5.0
SECONDS_TO_END = 20.0
SIZE = 3
STOPPED_S = "2"  # who is stopped for so long is given up; 30 s by default


@pytest.fixture
def programs():
    """``programs(bound, transport, num_batches)`` starts all ranks, and waits until they run."""
    started = []

    def start(*arguments):
        variables = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(SIZE),
        }
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        for rank in range(SIZE):
            environment = variables | {"RANK": str(rank), "PYTHONPATH": path}
            started.append(Program(str(HERE / "bls_program.py"), *arguments, env=environment))
        return started

    yield start
    for program in started:
        program.__exit__()


def output(program):
    return Path(program._folder.name, "stdout").read_text()


@pytest.mark.parametrize(
    ("how", "transport"), [("killed", "auto"), ("stopped", "auto"), ("killed", "stream")]
)
def test_all_others_name_the_rank_that_is_lost_and_end(programs, how, transport):
    before = set(os.listdir("/dev/shm"))
    ranks = programs(3, transport, 10**9, STOPPED_S)
    wait_until(lambda: all("running" in output(each) or each.poll() is not None for each in ranks))
    ranks[1].send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    lost = time.monotonic()
    for rank in (0, 2):
        ended = ranks[rank].end(SECONDS_TO_END)
        assert ended.returncode == 3, ended.stderr
        assert "named 1 after" in ended.stdout
        assert float(ended.stdout.split()[-1]) < SECONDS_TO_NOTICE
    assert time.monotonic() - lost < SECONDS_TO_END
    ranks[1].send_signal(signal.SIGKILL)
    wait_until(lambda: ranks[1].poll() is not None)
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize(("bound", "transport"), [(0, "auto"), (3, "stream")])
def test_programs_that_are_done_end_by_themselves(programs, bound, transport):
    for each in programs(bound, transport, 50):
        ended = each.end(60)
        assert ended.returncode == 0 and ended.stdout.endswith("done\n"), ended.stderr
