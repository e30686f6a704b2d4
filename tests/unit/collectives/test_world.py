"""Joining the ranks that the environment names; more of it in tests/distributed."""

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from forked import context
from pibroch.collectives import world as joining
from pibroch.collectives.world import world_of_environment
from pibroch.errors import ConfigError, TrainingError


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_one_process_needs_nothing(environment):
    for variables in ({}, {"RANK": "0", "WORLD_SIZE": "1"}):
        for name, value in variables.items():
            environment.setenv(name, value)
        with world_of_environment() as world:
            assert (
                world.is_first
                and world.ranks.world_size == 1
                and world.control.gather("a") == ["a"]
            )
            world.enter(1)
            assert not dist.is_initialized()


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("one", "2"), ("0", "")])
def test_odd_variables(environment, rank, size):
    environment.setenv("RANK", rank)
    environment.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match=r"RANK|WORLD_SIZE"), world_of_environment():
        pass


def join_and_die(port, attempt, rank):
    """A rank that torchrun has started, and that ends with nothing cleaned up."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    with world_of_environment() as world:
        os._exit(0 if world.control.gather(rank) == [0, 1] else 1)


def test_ranks_started_again_do_not_look_for_those_before():
    """torchrun's store outlives them, with the addresses at which the ranks before listened."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    for attempt in (0, 1):
        before = store.num_keys()
        ranks = []
        for rank in (0, 1):
            ranks.append(context().Process(target=join_and_die, args=(store.port, attempt, rank)))
            ranks[-1].start()
            deadline = time.monotonic() + 20
            while (
                store.num_keys() == before
            ):  # until rank 0 has said where it is, and looks for rank 1
                assert time.monotonic() < deadline and ranks[0].is_alive(), (
                    f"attempt {attempt} adds nothing of its own"
                )
                time.sleep(0.01)
        for process in ranks:
            process.join(60)
        assert [process.exitcode for process in ranks] == [0, 0], f"attempt {attempt}"


def test_ranks_that_do_not_find_each_other(environment):
    environment.setattr(joining, "RENDEZVOUS_TIMEOUT_S", 1.0)
    environment.setenv("RANK", "1")
    environment.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(TrainingError, match=r"no meeting of 2 ranks at \(no MASTER_ADDR\)"),
        world_of_environment(),
    ):
        pass
    environment.setenv("MASTER_ADDR", "127.0.0.1")
    environment.setenv("MASTER_PORT", "9")
    with (
        pytest.raises(TrainingError, match=r"no meeting of 2 ranks at 127\.0\.0\.1:9"),
        world_of_environment(),
    ):
        pass
    assert not dist.is_initialized()
