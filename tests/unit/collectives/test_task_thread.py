import gc
import os
import sys
import threading

import pytest

from pibroch.collectives.task_thread import TaskThread
from pibroch.errors import DataError


def test_errands_run_in_order_beside_the_caller():
    thread = TaskThread()
    seen = []
    futures = [
        thread.submit(lambda i=i: seen.append((i, threading.current_thread().name)) or i)
        for i in range(20)
    ]
    thread.flush()
    assert [future.result(0) for future in futures] == list(range(20))
    assert [i for i, _ in seen] == list(range(20))
    assert {name for _, name in seen} == {"pibroch-communication"}


def test_after_a_failure_nothing_more_is_sent():
    thread = TaskThread()
    seen = []

    def fail():
        raise RuntimeError("the peer is gone")

    thread.submit(fail)
    late = thread.submit(lambda: seen.append(1))
    for wait in (late.result, thread.flush):
        with pytest.raises(RuntimeError, match="the peer is gone"):
            wait()
    assert not seen


def test_bad_input_fails_alone():
    thread = TaskThread()

    def refuse():
        raise DataError("id 9")

    refused = thread.submit(refuse)
    assert thread.submit(lambda: 3).result(60) == 3
    with pytest.raises(DataError, match="id 9"):
        refused.result(0)


def test_the_thread_ends_with_its_object():
    before = set(threading.enumerate())
    tasks = TaskThread()
    tasks.flush()
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "pibroch-communication"
    del tasks
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have numbers of their own there")
def test_a_nice_thread_gives_way_and_others_do_not():
    own = os.getpriority(os.PRIO_PROCESS, 0)
    ask = lambda: os.getpriority(os.PRIO_PROCESS, 0)  # noqa: E731
    nice, plain = TaskThread("nice", nice=10), TaskThread("plain")
    assert nice.submit(ask).result(10) == min(own + 10, 19)
    assert plain.submit(ask).result(10) == own == os.getpriority(os.PRIO_PROCESS, 0)
