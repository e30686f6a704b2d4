"""The pool with its real loop: tasks run, waits do not starve others, slow ones get threads."""

import logging
import threading
import time

import pytest

from pibroch.rpc.calls.pool import Pool
from pibroch.wire.reactor import Reactor

TIMEOUT_S = 60.0


@pytest.fixture
def pool():
    loop = Reactor("test-loop")
    loop.start()
    made = Pool("test-pool", 4, loop)
    yield made
    made.close(5.0)
    loop.stop()


def submit_all(pool, tasks):
    """Run them, and wait for all."""
    left = [len(tasks)]
    lock = threading.Lock()
    done = threading.Event()

    def counted(task):
        def run():
            task()
            with lock:
                left[0] -= 1
                if not left[0]:
                    done.set()

        return run

    for task in tasks:
        pool.submit(counted(task))
    assert done.wait(TIMEOUT_S), f"{left[0]} tasks did not run"


def test_many_short_tasks_all_run(pool):
    ran = []
    submit_all(pool, [lambda i=i: ran.append(i) for i in range(5000)])
    assert sorted(ran) == list(range(5000))


def test_at_most_so_many_run_at_a_time_and_that_many_do(pool):
    running = [0]
    most = [0]
    lock = threading.Lock()
    all_there = threading.Barrier(4)

    def task():
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        all_there.wait(TIMEOUT_S)  # needs four at once
        until = time.monotonic() + 0.02
        while time.monotonic() < until:
            pass
        with lock:
            running[0] -= 1

    submit_all(pool, [task] * 16)
    assert most[0] == 4


def test_tasks_that_wait_for_later_ones(pool):
    """Each waits, and says so, until a task that was submitted after all of them has run."""
    released = threading.Event()

    def waits():
        with pool.waiting():
            assert released.wait(TIMEOUT_S)

    submit_all(pool, [waits] * 12 + [released.set])


def test_a_task_that_raises_is_logged_and_the_next_one_runs(pool):
    def fails():
        raise ValueError("on purpose")

    logged = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: logged.set()
    logging.getLogger("pibroch.rpc.calls.pool").addHandler(handler)
    try:
        pool.submit(fails)
        submit_all(pool, [lambda: None])
        assert logged.wait(TIMEOUT_S)
    finally:
        logging.getLogger("pibroch.rpc.calls.pool").removeHandler(handler)


def test_closing_while_threads_are_being_started():
    for delay_s in [0.00001 * turn for turn in range(100)]:
        loop = Reactor("busy")
        loop.start()
        made = Pool("busy", 4, loop)

        def submit(made=made):
            for _ in range(4):
                made.submit(lambda: time.sleep(0.0002))
                time.sleep(0.0002)

        submitting = [threading.Thread(target=submit) for _ in range(2)]
        for each in submitting:
            each.start()
        time.sleep(delay_s)  # another moment each time
        assert made.close(TIMEOUT_S)
        for each in submitting:
            each.join()
        loop.stop()


def test_closing_ends_its_threads():
    loop = Reactor("closing-loop")
    loop.start()
    made = Pool("closing-pool", 4, loop)
    submit_all(made, [lambda: None] * 100)
    assert made.close(TIMEOUT_S)
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("closing-pool")
    ]
    loop.stop()
