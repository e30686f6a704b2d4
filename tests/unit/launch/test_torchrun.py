"""Which rank does what, and what a launcher's processes tell each other."""

import threading

import pytest

from pibroch.errors import ConfigError, TrainingError
from pibroch.launch.job import TRAINER, Group, Job
from pibroch.launch.roles import groups_of
from pibroch.launch.torchrun import LauncherStore, part, shared
from pibroch.ports import free_port
from pibroch.roles import DATA_PROCESSOR, EMBEDDING_SERVER

TRAINERS = Group(TRAINER, "rank", 1, ("train",), are_ranks=True)
JOB = Job((TRAINERS, *groups_of({EMBEDDING_SERVER: 2, DATA_PROCESSOR: 1})), "run")


@pytest.mark.parametrize("num_processes", [4, 5, 9])
def test_every_rank_has_one_part(num_processes):
    job = shared(JOB, num_processes)
    parts = [part(job, rank) for rank in range(num_processes)]
    named = [(group.role, number) for group, number in parts]
    assert named[:-3] == [(TRAINER, number) for number in range(num_processes - 3)]
    assert named[-3:] == [
        ("embedding-server", 0),
        ("embedding-server", 1),
        ("data-processor", 0),
    ]
    assert job.num_ranks == num_processes - 3


def test_somebody_has_to_train():
    with pytest.raises(
        ConfigError, match=r"3 processes for .*2 embedding servers.*need 4 at least"
    ):
        shared(JOB, 3)


def test_a_launcher_is_needed(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=r"without a launcher.*torchrun"):
        LauncherStore()


@pytest.fixture
def launchers(monkeypatch):
    """Of two ranks, in two threads of this process."""
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
    }
    made = []
    for rank in range(2):
        for name, value in {**variables, "RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        made.append(LauncherStore())
    return made


def test_all_know_the_job_and_rank_0_waits_for_those_who_end(launchers):
    first, second = launchers
    seen = []
    waits = threading.Event()

    def serve():
        seen.append(second.job())
        for _ in second.wait_for_end():
            waits.set()
        seen.append("ends")
        second.has_ended()

    thread = threading.Thread(target=serve)
    thread.start()
    alone = Job((TRAINERS, *groups_of({DATA_PROCESSOR: 1})), "run")
    with first.leading(shared(alone, 2)) as job:
        assert waits.wait(60)
        assert "ends" not in seen and job.rendezvous.startswith("tcp://127.0.0.1:")
    assert seen[-1] == "ends", "leading() returns when the other one has ended"
    assert seen[0] == job
    thread.join()


def test_nobody_waits_for_a_rank_0_that_cannot_begin(launchers):
    launchers[0].give_up()
    with pytest.raises(TrainingError, match="could not begin"):
        launchers[1].job()
