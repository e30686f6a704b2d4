import gc
import threading

import pytest

from pibroch.collectives.courier import Courier
from pibroch.errors import DataError


def test_errands_run_in_order_beside_the_caller():
    courier, seen = Courier(), []
    futures = [courier.send(lambda i=i: seen.append((i, threading.current_thread().name)) or i) for i in range(20)]
    courier.flush()
    assert [future.result(0) for future in futures] == list(range(20))
    assert [i for i, _ in seen] == list(range(20))
    assert {name for _, name in seen} == {"pibroch-courier"}


def test_after_a_failure_nothing_more_is_sent():
    courier, seen = Courier(), []

    def fail():
        raise RuntimeError("the peer is gone")

    courier.send(fail)
    late = courier.send(lambda: seen.append(1))
    for wait in (late.result, courier.flush):
        with pytest.raises(RuntimeError, match="the peer is gone"):
            wait()
    assert not seen


def test_bad_input_fails_alone():
    courier = Courier()

    def refuse():
        raise DataError("id 9")

    refused = courier.send(refuse)
    assert courier.send(lambda: 3).result(60) == 3
    with pytest.raises(DataError, match="id 9"):
        refused.result(0)


def test_the_thread_ends_with_its_courier():
    before = set(threading.enumerate())
    courier = Courier()
    courier.flush()
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "pibroch-courier"
    del courier
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
