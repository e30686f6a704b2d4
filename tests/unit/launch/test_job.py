"""A job is data, complete and without a launcher."""

import subprocess
import sys
from pathlib import Path

import msgspec

from pibroch.config import load_recipe
from pibroch.launch.job import Job, Place, Restarts, variables
from pibroch.train.job import training_job

ALL_ROLES = [
    "embedding.exchange=lookahead",
    "embedding.exchange.servers=2",
    "embedding.exchange.oracle=central",
    "data.processors=3",
]
PLACE = Place("10.0.0.7", 29500, "tcp://10.0.0.7:29700")


def job_of(*settings):
    config = load_recipe("synthetic_small", settings)
    return training_job(config, Path("runs/a"), ["train"], 2, Restarts(10), threads_beside=1)


def test_a_run_names_all_its_processes():
    job = job_of(*ALL_ROLES)
    assert {group.role: group.count for group in job.groups} == {
        "trainer": 2,
        "embedding-server": 2,
        "oracle": 1,
        "data-processor": 3,
    }
    trainers, servers, oracle, processors = job.groups
    assert trainers.arguments(1) == ["train", "--run-dir", "runs/a"]
    assert trainers.arguments(1, is_again=True) == [*trainers.arguments(1), "--resume"]
    assert servers.arguments(1) == ["embedding-server", "--threads", "1", "--number", "1"]
    assert servers.restarts is None, "what it holds is lost: all begin again"
    assert oracle.restarts == Restarts(10) and processors.restarts == Restarts(10, or_without=True)
    assert {group.needs for group in job.groups[1:]} == {("trainer",)}


def test_processes_learn_where_they_meet():
    job = job_of(*ALL_ROLES)
    assert variables(job, job.groups[0], 1, PLACE) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "29500",
        "PIBROCH_RENDEZVOUS": "tcp://10.0.0.7:29700",
    }
    assert variables(job, job.groups[1], 1, PLACE) == {"PIBROCH_RENDEZVOUS": PLACE.rendezvous}
    on_two_machines = variables(job, job.groups[0], 1, PLACE, range(1, 2))
    assert (on_two_machines["LOCAL_RANK"], on_two_machines["LOCAL_WORLD_SIZE"]) == ("0", "1")
    alone = job_of()
    assert "PIBROCH_RENDEZVOUS" not in variables(alone, alone.groups[0], 0, PLACE)


def test_what_runs_elsewhere_is_not_of_the_job():
    job = job_of(*ALL_ROLES, "data.rendezvous=tcp://10.0.0.8:29700")
    assert [group.role for group in job.groups] == ["trainer", "embedding-server", "oracle"]
    assert variables(job, job.groups[1], 0, PLACE)["PIBROCH_RENDEZVOUS"] == "tcp://10.0.0.8:29700"


def test_fewer_ranks_are_another_job():
    job = job_of(*ALL_ROLES).with_ranks(1)
    assert variables(job, job.groups[0], 0, PLACE)["WORLD_SIZE"] == "1"
    assert sum(group.count for group in job.groups) == 1 + 2 + 1 + 3


def test_a_job_is_written_and_read():
    job = job_of(*ALL_ROLES)
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job


def test_to_make_one_loads_neither_torch_nor_numba():
    program = "import sys, pibroch.train.job; print({'torch', 'numba'} & set(sys.modules))"
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert made.stdout == "set()\n", made.stderr
