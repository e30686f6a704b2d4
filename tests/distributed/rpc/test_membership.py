"""Workers that join late, leave, come back, or are the rendezvous's host and die."""

import time

import pytest
import torch
from rpc_team import TIMEOUT_S, Team, Worker, join, leave

from pibroch import rpc
from pibroch.errors import ConfigError, UnknownWorkerError, WorkerLostError
from pibroch.ports import free_port

pytestmark = pytest.mark.timeout(120)


def who_is_there(to):
    return rpc.rpc_sync(to, rpc.get_worker_info).name


def knows(name):
    try:
        return rpc.get_worker_info(name).id
    except UnknownWorkerError:
        return None


def is_forgotten(name, seconds=30):
    """A goodbye needs its time to arrive."""
    deadline = time.monotonic() + seconds
    while knows(name) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return knows(name) is None


def call_until_it_answers(to, seconds):
    """Calls fail with one error while the worker is away, and reach it once it is back."""
    deadline = time.monotonic() + seconds
    failures = set()
    while time.monotonic() < deadline:
        try:
            return rpc.rpc_sync(to, rpc.get_worker_info).name, failures
        except WorkerLostError as error:
            failures.add(error.worker)
            time.sleep(0.02)
    return None, failures


def try_to_join(name, rank, port):
    try:
        join(name, rank, None, port, {})
    except ConfigError as error:
        return str(error)
    return None


@pytest.fixture
def processes():
    started = []

    def start(count):
        started.extend(Worker() for _ in range(count))
        return started[-count:]

    yield start
    for each in started:
        each.close()


def test_a_group_without_a_size_grows_and_shrinks(processes):
    port = free_port()
    first, second = processes(2)
    first.run(join, "first", 0, None, port, {})
    assert first.run(knows, "second") is None
    second.run(join, "second", 1, None, port, {})
    assert first.run(who_is_there, "second") == "second"
    assert second.run(who_is_there, "first") == "first"
    second.run(leave)
    assert first.run(is_forgotten, "second")
    (third,) = processes(1)
    assert "first" in third.run(try_to_join, "first", 5, port), "a name that a living worker has"
    third.run(join, "second", 1, None, port, {})
    assert first.run(who_is_there, "second") == "second"


def test_the_host_of_the_meeting_place_comes_back():
    team = Team(3)
    try:
        assert team.run(1, who_is_there, "worker0") == "worker0"
        team.workers[0].kill()
        assert team.run(1, call_until_it_answers, "worker0", 0.5) == (None, {"worker0"}), (
            "and no other error"
        )
        team.workers[2].start(call_until_it_answers, "worker0", 60)
        team.replace(0)
        name, failures = team.workers[2].result()
        assert name == "worker0" and failures <= {"worker0"}
        assert team.run(1, call_until_it_answers, "worker0", 30)[0] == "worker0"
        assert team.run(0, who_is_there, "worker2") == "worker2"
    finally:
        team.close()


def meet_in_a_store(rank, port, path):
    store = (
        torch.distributed.FileStore(path, 2)
        if path
        else torch.distributed.TCPStore("127.0.0.1", port, 2, rank == 0)
    )
    options = rpc.RpcBackendOptions(store=store, allowed_modules=["test_membership"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    return who_is_there(f"worker{1 - rank}")


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_meeting_in_a_store_that_is_given(processes, tmp_path, kind):
    pair = processes(2)
    port = free_port()
    for rank, each in enumerate(pair):
        each.start(meet_in_a_store, rank, port, str(tmp_path / "store") if kind == "file" else "")
    assert [each.result(TIMEOUT_S) for each in pair] == ["worker1", "worker0"]
