"""Joining and leaving: what works when, by which rendezvous, and who may come later."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rpc_team import Worker

from pibroch import rpc
from pibroch.errors import ConfigError, NotAllowedError, RpcError, RpcTimeoutError
from pibroch.ports import free_port

pytestmark = pytest.mark.timeout(120)

MODULES = ["test_life"]


@pytest.fixture
def processes():
    """``processes(n)``: n processes that are no workers yet."""
    started = []

    def start(count):
        new = [Worker() for _ in range(count)]
        started.extend(new)
        return new

    yield start
    for each in started:
        each.close()


def join(name, rank, world_size, init_method, **options):
    given = {"allowed_modules": MODULES, "init_method": init_method, "rpc_timeout": 30.0} | options
    rpc.init_rpc(
        name, rank=rank, world_size=world_size, rpc_backend_options=rpc.RpcBackendOptions(**given)
    )


def together(workers, function, *args):
    for worker in workers:
        worker.start(function, *args)
    return [worker.result() for worker in workers]


def join_all(workers, init_method, world_size=None, **options):
    for rank, worker in enumerate(workers):
        worker.start(join, f"w{rank}", rank, world_size, init_method, **options)
    for worker in workers:
        worker.result()


def identity(value):
    return value


def call(to, value):
    return rpc.rpc_sync(to, identity, (value,))


def leave(graceful=True):
    rpc.shutdown(graceful=graceful)


# one process


def test_nothing_works_before_joining():
    for use in (
        lambda: rpc.rpc_sync("w1", identity, (1,)),
        lambda: rpc.rpc_async("w1", identity, (1,)),
        lambda: rpc.remote("w1", identity, (1,)),
        lambda: rpc.RRef(1),
        rpc.get_worker_info,
        rpc.shutdown,
        lambda: rpc.shutdown(graceful=False),
    ):
        with pytest.raises(RuntimeError, match="init"):
            use()


def live(init_method):
    with pytest.raises(TypeError, match="BackendType"):
        rpc.init_rpc("w0", backend="x", rank=0, world_size=1)
    with pytest.raises(TypeError, match="options"):
        rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options={"rpc_timeout": 1})
    for name in ("", "two words", "a" * 128, "ä"):
        with pytest.raises((ConfigError, RuntimeError), match="name"):
            rpc.init_rpc(name, rank=0, world_size=1)
    for _ in range(2):
        join("w0", 0, 1, init_method)
        with pytest.raises(RuntimeError, match="already"):
            join("w0", 0, 1, init_method)
        assert rpc.rpc_sync("w0", identity, (3,)) == 3
        late = rpc.rpc_async("w0", identity, (4,))
        rpc.shutdown()
        assert late.wait() == 4, "a graceful shutdown waits for calls under way"
        with pytest.raises(RuntimeError, match="init"):
            rpc.rpc_sync("w0", identity, (3,))


def test_a_life_and_another_one(processes):
    (worker,) = processes(1)
    worker.run(live, f"tcp://127.0.0.1:{free_port()}")


def test_all_backends_are_one(processes):
    (worker,) = processes(1)
    worker.run(join_with_backend, f"tcp://127.0.0.1:{free_port()}")


def join_with_backend(init_method):
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=2, rpc_timeout=7, init_method=init_method
    )
    rpc.init_rpc(
        "w0", backend=rpc.BackendType.TENSORPIPE, rank=0, world_size=1, rpc_backend_options=options
    )
    assert rpc.get_worker_info().name == "w0"
    rpc.shutdown()


# where workers meet


@pytest.mark.parametrize("scheme", ["tcp", "file", "env"])
def test_workers_meet(processes, scheme, tmp_path):
    workers = processes(2)
    port = free_port()
    method = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/meet", "env": "env://"}[
        scheme
    ]
    if scheme == "env":
        together(workers, set_environment, port)
    join_all(workers, method, world_size=2)
    assert workers[0].run(call, "w1", 5) == 5
    assert workers[1].run(call, "w0", 6) == 6
    together(workers, leave)


def set_environment(port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_rank_and_size_come_from_the_environment(processes):
    workers = processes(2)
    port = free_port()
    for rank, worker in enumerate(workers):
        worker.start(join_by_environment, rank, port)
    assert [worker.result() for worker in workers] == [0, 1]
    assert workers[0].run(call, "w1", 5) == 5
    together(workers, leave)


def join_by_environment(rank, port):
    set_environment(port)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    join(f"w{rank}", -1, None, "env://")
    return rpc.get_worker_info().id


def test_who_does_not_come_is_waited_for_no_longer_than_the_timeout(processes):
    (worker,) = processes(1)
    worker.run(wait_in_vain, f"tcp://127.0.0.1:{free_port()}")


def wait_in_vain(init_method):
    began = time.monotonic()
    with pytest.raises(RpcTimeoutError, match="worker 1"):
        join("w0", 0, 2, init_method, rpc_timeout=1.0)
    assert time.monotonic() - began < 30
    with pytest.raises(RuntimeError, match="init"):
        rpc.get_worker_info()


def test_no_environment_is_said(processes):
    (worker,) = processes(1)
    worker.run(join_nowhere)


def join_nowhere():
    for variable in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        rpc.init_rpc("w0", rank=0, world_size=1)
    with pytest.raises((ConfigError, RuntimeError, ValueError)):
        join("w0", 0, 1, "carrier-pigeon://x")


def test_a_name_that_another_has_is_refused(processes):
    first, second = processes(2)
    method = f"tcp://127.0.0.1:{free_port()}"
    first.run(join, "w0", 0, None, method)
    second.run(join_taken, method)
    assert first.run(call, "w0", 1) == 1


def join_taken(method):
    with pytest.raises((ConfigError, RuntimeError), match="w0"):
        join("w0", 1, None, method)
    with pytest.raises((ConfigError, RuntimeError), match="0"):
        join("w1", 0, None, method.replace("tcp://127.0.0.1", "tcp://localhost"))


# leaving


def work_then_leave(to, size):
    """Calls that take a while, and away: both sides must stay until they are answered."""
    futures = [rpc.rpc_async(to, slow_sum, (torch.ones(size),)) for _ in range(20)]
    rpc.shutdown()
    return [future.wait() for future in futures]


def slow_sum(tensor):
    total = 0.0
    for _ in range(20):
        total = tensor.sum().item()
    return total


def test_shutdown_waits_for_what_is_under_way(processes):
    workers = processes(3)
    join_all(workers, f"tcp://127.0.0.1:{free_port()}", world_size=3)
    for index, worker in enumerate(workers):
        worker.start(work_then_leave, f"w{(index + 1) % 3}", 100_000)
    assert [worker.result() for worker in workers] == [[100_000.0] * 20] * 3


def use_torch_in_new_threads():
    """Results of eight threads that compute for the first time, and at once.

    After init_rpc in a forked process.
    """
    together = threading.Barrier(8)

    def compute(_):
        together.wait(20)
        return torch.ones(100_000).sum().item()

    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(compute, range(8)))


def test_threads_of_a_forked_worker_may_compute_at_once(processes):
    """torch rebuilds what it lost by the fork without a lock.

    Agents see to it that this is done before they have threads.
    """
    workers = processes(3)
    join_all(workers, f"tcp://127.0.0.1:{free_port()}", world_size=3)
    for worker in workers:
        assert worker.run(use_torch_in_new_threads) == [100_000.0] * 8


def chain_then_leave(names, depth):
    future = rpc.rpc_async(names[0], hop, (names, depth))
    rpc.shutdown()
    return future.wait()


def hop(names, depth):
    """Calls that start calls: a worker is idle between them, but not done."""
    if depth == 0:
        return 0
    return 1 + rpc.rpc_sync(names[depth % len(names)], hop, (names, depth - 1))


def test_shutdown_waits_for_calls_of_calls(processes):
    workers = processes(3)
    join_all(workers, f"tcp://127.0.0.1:{free_port()}", world_size=3)
    assert together(workers, chain_then_leave, ["w0", "w1", "w2"], 30) == [30] * 3


def leave_reading_late():
    """Between two looks at the connection that this thread reads, the loop sees another one end."""
    for _ in range(10):
        call("w0", 1)
    os.sched_yield = lambda: time.sleep(0.05)
    rpc.shutdown()


def test_answers_of_a_worker_that_leaves_arrive(processes):
    workers = processes(3)
    join_all(workers, f"tcp://127.0.0.1:{free_port()}", world_size=3)
    for name in ("w1", "w2"):
        assert workers[0].run(call, name, 1) == 1
    together(workers, leave_reading_late)


def test_all_leave_and_join_again(processes):
    workers = processes(2)
    for _ in range(3):
        method = f"tcp://127.0.0.1:{free_port()}"
        join_all(workers, method, world_size=2)
        assert workers[0].run(call, "w1", 5) == 5
        together(workers, leave)
    assert workers[0].run(threads_that_stay) == []


def threads_that_stay(timeout_s=30):
    """Those that have been told to end need a moment."""
    deadline = time.monotonic() + timeout_s
    while result := [thread.name for thread in threading.enumerate() if "rpc" in thread.name]:
        if time.monotonic() > deadline:
            return result
        time.sleep(0.01)
    return []


# a group that changes


def test_workers_come_and_go(processes):
    workers = processes(3)
    method = f"tcp://127.0.0.1:{free_port()}"
    join_all(workers[:2], method)
    assert workers[1].run(call, "w0", 1) == 1
    workers[2].run(join, "w2", 2, None, method)
    assert workers[0].run(call, "w2", 2) == 2
    assert workers[2].run(call, "w1", 3) == 3
    workers[1].run(leave)
    assert workers[0].run(error_of, "w1") == "RuntimeError"
    assert workers[0].run(call, "w2", 4) == 4
    workers[1].run(join, "w1", 1, None, method)
    assert workers[0].run(call, "w1", 5) == 5
    assert workers[2].run(call, "w1", 6) == 6
    workers[2].run(leave, False)
    assert workers[0].run(error_of, "w2") == "RuntimeError"
    for worker in (workers[1], workers[0]):
        worker.run(leave)


def error_of(to):
    try:
        rpc.rpc_sync(to, identity, (1,))
    except RuntimeError:
        return "RuntimeError"


def look_for(name):
    with pytest.raises(RpcError, match=f"no answer from the rendezvous about 'worker/{name}'"):
        rpc.rpc_sync(name, identity, (1,))


def test_without_its_meeting_place_a_worker_says_so(processes):
    workers = processes(2)
    join_all(workers, f"tcp://127.0.0.1:{free_port()}")
    workers[0].kill()
    workers[1].run(look_for, "w7")


@pytest.mark.alone  # looks at /dev/shm
def test_nothing_is_left_in_shared_memory(processes):
    workers = processes(2)
    before = set(os.listdir("/dev/shm"))
    join_all(workers, f"tcp://127.0.0.1:{free_port()}", world_size=2)
    workers[0].run(call_large, "w1")
    assert set(os.listdir("/dev/shm")) <= before
    workers[1].kill()
    workers[0].kill()
    assert set(os.listdir("/dev/shm")) <= before


def call_large(to):
    assert rpc.rpc_sync(to, identity, (torch.ones(1_000_000),)).sum() == 1_000_000


def send_what_has_no_bytes(to):
    """Reading the memory of such a tensor would end the process."""
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for tensor in (
        torch.empty(3, device="meta"),
        torch.empty(100_000, device="meta"),
        quantized,
        nested,
    ):
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(NotAllowedError):
                call(to, identity, (tensor,))


def test_tensors_without_memory_here_are_refused(processes):
    workers = processes(2)
    join_all(workers, f"tcp://127.0.0.1:{free_port()}", world_size=2)
    workers[0].run(send_what_has_no_bytes, "w1")
    assert workers[0].run(call, "w1", 1) == 1


# modules that are loaded late


def call_at_once(to, count):
    import slow_to_load

    calls = [rpc.rpc_async(to, slow_to_load.identity, (number,)) for number in range(count)]
    return [each.wait() for each in calls]


def test_first_calls_into_a_module_that_is_being_loaded(processes):
    workers = processes(2)
    join_all(
        workers,
        f"tcp://127.0.0.1:{free_port()}",
        world_size=2,
        allowed_modules=["test_life", "slow_to_load"],
    )
    assert workers[0].run(call_at_once, "w1", 50) == list(range(50))
