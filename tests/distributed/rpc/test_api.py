"""Calls between two workers behave as those of ``torch.distributed.rpc``.

Each ``case_`` runs in worker 0.
"""

import threading
import traceback

import pytest
import torch

from pibroch import rpc
from pibroch.errors import NotAllowedError, RemoteError, RpcError, RpcTimeoutError

pytestmark = pytest.mark.timeout(120)

HERE = "worker0"
PEER = "worker1"
TIMEOUT_S = 20


# what is called


def add(x, y=1):
    return x + y


def name():
    return rpc.get_worker_info().name


def collect(*args, **kwargs):
    return [args, kwargs]


def call_back(to):
    return rpc.rpc_sync(to, name)


def bounce(depth):
    """Worker 0 calls worker 1 calls worker 0 ..., all of them waiting."""
    if depth == 0:
        return []
    to = PEER if name() == HERE else HERE
    return [name(), *rpc.rpc_sync(to, bounce, (depth - 1,))]


def call_self(depth):
    return 0 if depth == 0 else 1 + rpc.rpc_sync(name(), call_self, (depth - 1,))


class Adder:
    """Things that can be called by name."""

    def __init__(self, start=0):
        self.start = start

    @staticmethod
    def static_add(x, y):
        return x + y

    @classmethod
    def class_add(cls, x, y):
        return cls.__name__, x + y

    @staticmethod
    @rpc.functions.async_execution
    def static_add_later(to, x, y):
        return rpc.rpc_async(to, add, (x, y)).then(lambda done: done.wait() + 100)

    @classmethod
    @rpc.functions.async_execution
    def class_add_later(cls, to, x, y):
        answer = torch.futures.Future()
        rpc.rpc_async(to, add, (x, y)).then(
            lambda done: answer.set_result((cls.__name__, done.wait()))
        )
        return answer

    @rpc.functions.async_execution
    def add_later(self, to, x):
        return rpc.rpc_async(to, add, (self.start, x))


events: dict = {}
gates_lock = threading.Lock()


def event(key):
    with gates_lock:
        return events.setdefault(key, threading.Event())


def wait_at(key):
    assert event(key).wait(TIMEOUT_S)
    return key


def set_event(key):
    event(key).set()


# who is called, and with what


def case_destinations():
    info = rpc.get_worker_info(PEER)
    assert (info.name, info.id) == (PEER, 1)
    assert rpc.get_worker_info().name == HERE
    for to in (PEER, 1, info):
        assert rpc.rpc_sync(to, name) == PEER
        assert rpc.rpc_async(to, name).wait() == PEER
        assert rpc.remote(to, name).to_here() == PEER
    for to in (HERE, 0, rpc.get_worker_info()):
        assert rpc.rpc_sync(to, name) == HERE
        assert rpc.rpc_async(to, name).wait() == HERE
        assert rpc.remote(to, name).to_here() == HERE


def test_by_name_by_id_and_by_info(workers):
    workers(2).run(0, case_destinations)


def case_arguments():
    assert rpc.rpc_sync(PEER, add, (1,)) == 2
    assert rpc.rpc_sync(PEER, add, [1, 2]) == 3
    assert rpc.rpc_sync(PEER, add, (1,), {"y": 5}) == 6
    assert rpc.rpc_sync(PEER, add, kwargs={"x": 1, "y": 7}) == 8
    assert rpc.rpc_sync(PEER, collect, (1, (2, [3])), {"a": None, "b": {"c": ()}}) == [
        (1, (2, [3])),
        {"a": None, "b": {"c": ()}},
    ]
    assert rpc.remote(PEER, add, (1,), {"y": 3}).to_here() == 4


def test_arguments(workers):
    workers(2).run(0, case_arguments)


def case_callables():
    assert torch.equal(rpc.rpc_sync(PEER, torch.add, (torch.ones(2), 1)), torch.full((2,), 2.0))
    assert rpc.rpc_sync(PEER, len, ([1, 3, 2],)) == 3
    assert rpc.rpc_sync(PEER, Adder.static_add, (1, 2)) == 3
    assert rpc.rpc_sync(PEER, Adder.class_add, (1, 2)) == ("Adder", 3)
    rref = rpc.remote(PEER, Adder, (10,))
    assert rref.rpc_sync().static_add(1, 2) == 3
    assert rref.rpc_async().class_add(1, 2).wait() == ("Adder", 3)
    assert rref.remote().class_add(1, 2).to_here() == ("Adder", 3)


def test_functions_classes_and_methods(workers):
    workers(2).run(0, case_callables)


def case_refused():
    for function in (lambda: 1, 5, Adder(1).add_later, threading.Lock().acquire):
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises((NotAllowedError, TypeError)):
                call(PEER, function)


def test_what_cannot_be_named_is_refused_at_the_caller(workers):
    workers(2).run(0, case_refused)


# calls in calls


def case_nested():
    assert rpc.rpc_sync(HERE, name) == HERE
    assert rpc.rpc_sync(PEER, call_back, (HERE,)) == HERE
    assert rpc.rpc_sync(PEER, call_back, (PEER,)) == PEER
    assert rpc.rpc_sync(PEER, bounce, (50,)) == [PEER, HERE] * 25
    assert rpc.rpc_sync(PEER, call_self, (50,)) == 50


def test_nested_calls_fifty_deep(workers):
    workers(2).run(0, case_nested)


def case_nested_at_once():
    """More chains than threads, all of which wait for each other's worker."""
    chains = [rpc.rpc_async(PEER, bounce, (10,)) for _ in range(40)]
    for chain in chains:
        assert chain.wait() == [PEER, HERE] * 5


def test_many_nested_calls_at_once(workers):
    workers(2).run(0, case_nested_at_once)


# asynchronous execution


@rpc.functions.async_execution
def add_later(to, x, y, z):
    return rpc.rpc_async(to, add, (x, y)).then(lambda done: done.wait() + z)


@rpc.functions.async_execution
def add_much_later(to, numbers):
    """A chain of calls, each started when the one before it has answered."""
    future = rpc.rpc_async(to, add, (numbers[0], 0))
    for number in numbers[1:]:
        future = future.then(
            lambda done, number=number: rpc.rpc_sync(to, add, (done.wait(), number))
        )
    return future


@rpc.functions.async_execution
def add_all(to, numbers):
    calls = [rpc.rpc_async(to, add, (number, 1)) for number in numbers]
    return torch.futures.collect_all(calls).then(
        lambda done: sum(call.wait() for call in done.wait())
    )


@rpc.functions.async_execution
def fail_later(message):
    future = torch.futures.Future()
    future.set_exception(ValueError(message))
    return future


@rpc.functions.async_execution
def fail_in_callback(to):
    return rpc.rpc_async(to, add, (1, 2)).then(lambda done: {}[done.wait()])


@rpc.functions.async_execution
def no_future():
    return 5


def future_without_mark():
    future = torch.futures.Future()
    future.set_result(5)
    return future


def case_async_execution():
    one = torch.ones(2)
    for to in (HERE, PEER):
        assert torch.equal(rpc.rpc_sync(PEER, add_later, (to, one, 1, 1)), one * 3)
        assert rpc.rpc_async(PEER, add_later, (to, 1, 2), {"z": 3}).wait() == 6
        assert rpc.remote(PEER, add_later, (to, 1, 2, 3)).to_here() == 6
        assert rpc.rpc_sync(PEER, add_much_later, (to, [1, 2, 3, 4])) == 10
        assert rpc.rpc_sync(PEER, add_all, (to, range(10))) == 55
        assert rpc.rpc_sync(PEER, Adder.static_add_later, (to, 1, 2)) == 103
        assert rpc.rpc_sync(PEER, Adder.class_add_later, (to, 1, 2)) == ("Adder", 3)
        rref = rpc.remote(PEER, Adder, (10,))
        assert rref.rpc_sync().add_later(to, 1) == 11
        assert rref.rpc_async().static_add_later(to, 1, 1).wait() == 102
        assert rref.remote().class_add_later(to, 1, 1).to_here() == ("Adder", 2)


def test_async_execution_of_functions_and_methods(workers):
    workers(2).run(0, case_async_execution)


def case_async_errors():
    with pytest.raises(ValueError, match="later"):
        rpc.rpc_sync(PEER, fail_later, ("later",))
    with pytest.raises(RuntimeError, match="KeyError: 3"):  # torch's futures make it one
        rpc.rpc_sync(PEER, fail_in_callback, (HERE,))
    with pytest.raises(ValueError, match="later"):
        rpc.remote(PEER, fail_later, ("later",)).to_here()
    with pytest.raises(RuntimeError, match="Future"):
        rpc.rpc_sync(PEER, no_future)
    with pytest.raises((RuntimeError, TypeError), match="Future"):
        rpc.rpc_sync(PEER, future_without_mark)


def test_errors_of_async_execution(workers):
    workers(2).run(0, case_async_errors)


places: list[torch.futures.Future] = [torch.futures.Future() for _ in range(100)]


@rpc.functions.async_execution
def parked(place):
    return places[place]


def unpark(place):
    places[place].set_result(place)


def case_parked():
    # far more than threads
    waiting = [rpc.rpc_async(PEER, parked, (index,)) for index in range(100)]
    assert rpc.rpc_sync(PEER, add, (1, 1)) == 2
    for index in range(100):
        rpc.rpc_sync(PEER, unpark, (index,))
    assert [call.wait() for call in waiting] == list(range(100))


def test_async_execution_holds_no_thread(workers):
    workers(2).run(0, case_parked)


# futures


def case_futures():
    calls = [rpc.rpc_async(PEER, add, (number, 1)) for number in range(5)]
    assert torch.futures.wait_all(calls) == [1, 2, 3, 4, 5]
    assert all(call.done() for call in calls)
    assert [call.value() for call in torch.futures.collect_all(calls).wait()] == [1, 2, 3, 4, 5]
    assert rpc.rpc_async(PEER, add, (1, 1)).then(lambda done: done.wait() * 10).wait() == 20
    seen = []
    called = threading.Event()
    future = rpc.rpc_async(PEER, add, (1, 1))
    future.add_done_callback(lambda done: (seen.append(done.wait()), called.set()))
    assert called.wait(TIMEOUT_S) and seen == [2]
    with pytest.raises(RuntimeError, match="TypeError"):  # torch's futures make it one
        rpc.rpc_async(PEER, add, (1, "1")).then(lambda done: done.wait()).wait()
    with pytest.raises(TypeError):
        torch.futures.wait_all(
            [rpc.rpc_async(PEER, add, (1, 1)), rpc.rpc_async(PEER, add, (1, "1"))]
        )


def test_futures(workers):
    workers(2).run(0, case_futures)


def case_callbacks_call():
    def call_again(done):
        done.wait()
        return sum(rpc.rpc_sync(to, add, (10, 1), timeout=TIMEOUT_S) for to in (HERE, PEER))

    futures = [rpc.rpc_async(PEER, add, (1, 1)).then(call_again) for _ in range(50)]
    assert torch.futures.wait_all(futures) == [22] * 50
    both = torch.futures.collect_all([rpc.rpc_async(PEER, add, (1, 1)) for _ in range(3)])
    assert both.then(call_again).wait() == 22


def test_callbacks_that_call(workers):
    workers(2).run(0, case_callbacks_call)


# errors


class OwnError(Exception):
    """Built from its message."""


class HardToBuildError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def fail(kind):
    errors = {
        "value": ValueError("not 5"),
        "key": KeyError("k"),
        "own": OwnError("mine"),
        "hard": HardToBuildError(1, 2),
        "os": FileNotFoundError(2, "no such file", "x"),
        "stop": StopIteration(3),
        "assert": AssertionError("no"),
    }
    raise errors[kind]


def case_errors():
    for call in (
        rpc.rpc_sync,
        lambda *a: rpc.rpc_async(*a).wait(),
        lambda *a: rpc.remote(*a).to_here(),
    ):
        for to in (PEER, HERE):
            with pytest.raises(ValueError, match=r"^not 5$"):
                call(to, fail, ("value",))
            with pytest.raises(KeyError) as key:
                call(to, fail, ("key",))
            assert key.value.args == ("k",)
            with pytest.raises(OwnError, match=r"^mine$") as own:
                call(to, fail, ("own",))
            assert "in fail" in "".join(traceback.format_exception(own.value)), (
                "the callee's traceback"
            )
            with pytest.raises((HardToBuildError, RemoteError), match="1 and 2"):
                call(to, fail, ("hard",))
            with pytest.raises(FileNotFoundError) as missing:
                call(to, fail, ("os",))
            assert missing.value.errno == 2 and missing.value.filename == "x"
            with pytest.raises(AssertionError, match=r"^no$"):
                call(to, fail, ("assert",))
            with pytest.raises(TypeError, match="argument"):
                call(to, add)


def test_errors_keep_type_and_message(workers):
    workers(2).run(0, case_errors)


def case_error_of_iteration():
    """A StopIteration cannot be the result of a future in torch; whatever comes, the call ends."""
    with pytest.raises((StopIteration, RuntimeError)):
        rpc.rpc_sync(PEER, fail, ("stop",))
    assert rpc.rpc_sync(PEER, add, (1, 1)) == 2


def test_a_stopped_iteration_ends_the_call(workers):
    workers(2).run(0, case_error_of_iteration)


def no_data():
    return threading.Lock()


def case_not_data():
    with pytest.raises(NotAllowedError, match="lock"):
        rpc.rpc_sync(PEER, add, (threading.Lock(),))
    with pytest.raises(NotAllowedError, match="lock"):
        rpc.rpc_sync(PEER, no_data)
    assert rpc.rpc_sync(PEER, add, (1, 1)) == 2


def test_values_that_are_no_data_are_refused(workers):
    workers(2).run(0, case_not_data)


def case_unknown():
    for to in ("nobody", 77):
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(RuntimeError, match=r"nobody|77"):
                call(to, name)
    with pytest.raises(RuntimeError, match="nobody"):
        rpc.get_worker_info("nobody")
    with pytest.raises((TypeError, ValueError)):
        rpc.rpc_sync(1.5, name)


def test_unknown_workers_raise_what_torch_raises(workers):
    workers(2).run(0, case_unknown)


# time


def case_timeouts():
    for kind in (RuntimeError, TimeoutError, RpcTimeoutError, RpcError):
        with pytest.raises(kind, match="timeout"):
            rpc.rpc_sync(PEER, wait_at, ("never",), timeout=0.05)
    future = rpc.rpc_async(PEER, wait_at, ("never",), timeout=0.05)
    with pytest.raises(RpcTimeoutError):
        future.wait()
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync(HERE, wait_at, ("never here",), timeout=0.05)
    rref = rpc.remote(PEER, wait_at, ("never",))
    with pytest.raises(RpcTimeoutError):
        rref.to_here(timeout=0.05)
    rpc.rpc_sync(PEER, set_event, ("never",))
    assert rref.to_here() == "never"
    set_event("never here")


def test_timeouts_of_single_calls(workers):
    workers(2).run(0, case_timeouts)


def case_zero_is_no_timeout():
    late = rpc.rpc_async(PEER, wait_at, ("zero",), timeout=0)
    with pytest.raises(RpcTimeoutError):  # so some time has passed
        rpc.rpc_sync(PEER, wait_at, ("zero",), timeout=0.2)
    assert not late.done()
    rpc.rpc_sync(PEER, set_event, ("zero",))
    assert late.wait() == "zero"


def test_timeout_zero_means_none(workers):
    workers(2).run(0, case_zero_is_no_timeout)


def case_slow_ones():
    slow = [rpc.rpc_async(PEER, wait_at, ("slow",)) for _ in range(8)]
    assert [rpc.rpc_sync(PEER, add, (number,), timeout=TIMEOUT_S) for number in range(20)] == list(
        range(1, 21)
    )
    assert not any(call.done() for call in slow)
    rpc.rpc_sync(PEER, set_event, ("slow",))
    assert [call.wait() for call in slow] == ["slow"] * 8


def test_slow_functions_do_not_delay_others(workers):
    workers(2).run(0, case_slow_ones)


# many at once


def case_threads():
    """In both workers at once."""
    wrong = []

    def many(thread):
        for number in range(50):
            to = PEER if (thread + number) % 3 else HERE  # the caller is one of them
            if rpc.rpc_sync(to, add, (thread, number)) != thread + number:
                wrong.append((thread, number))

    threads = [threading.Thread(target=many, args=(index,)) for index in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads) and not wrong


def test_many_threads_call_at_once(workers):
    workers(2).run_all(case_threads)


def case_many_in_flight():
    calls = [
        rpc.rpc_async(PEER, add, (torch.full((100,), float(number)),)) for number in range(2000)
    ]
    for number, call in enumerate(calls):
        assert torch.equal(call.wait(), torch.full((100,), number + 1.0))


def test_thousands_in_flight(workers):
    workers(2).run(0, case_many_in_flight)
