"""The loop: order, timers, the standby thread, and sleeping when there is nothing to do."""

import asyncio
import os
import queue
import socket
import threading
import time

import pytest

from pibroch.wire.reactor import READ, WRITE, Reactor

pytestmark = pytest.mark.alone  # times of milliseconds, idle CPU

TIMEOUT_S = 60.0


@pytest.fixture
def loop():
    made = Reactor("test-loop")
    made.start()
    yield made
    made.stop()


def run_on(loop, function):
    done = threading.Event()
    results = []

    def run():
        results.append(function())
        done.set()

    loop.call_soon(run)
    assert done.wait(TIMEOUT_S)
    return results[0]


def test_functions_run_in_order_on_one_thread(loop):
    ran = []
    for i in range(1000):
        loop.call_soon(lambda i=i: ran.append((i, threading.get_ident())))
    here = run_on(loop, threading.get_ident)
    assert ran == [(i, here) for i in range(1000)] and here != threading.get_ident()
    assert not loop.is_loop_thread() and run_on(loop, loop.is_loop_thread)


def test_who_wakes_a_loop_that_has_just_ended_writes_into_no_descriptor_of_others(monkeypatch):
    loop = Reactor("ending")
    write = os.eventfd_write
    pipes = []
    loop.start()

    def end_first(fd, value):
        monkeypatch.undo()
        loop.stop()
        pipes.extend(os.pipe2(os.O_NONBLOCK)[::-1] for _ in range(10))
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", end_first)
    loop.call_soon(lambda: None)
    for writer, reader in pipes:
        with pytest.raises(BlockingIOError):
            os.read(reader, 8)
        os.close(writer)
        os.close(reader)


def test_timers_run_in_the_order_of_their_times(loop):
    ran = []
    done = threading.Event()
    now = time.monotonic()
    for delay in (0.06, 0.02, 0.04):
        loop.call_at(now + delay, lambda delay=delay: ran.append((delay, time.monotonic() - now)))
    loop.call_at(now + 0.08, done.set)
    assert done.wait(TIMEOUT_S)
    assert [delay for delay, _ in ran] == [0.02, 0.04, 0.06]
    assert all(took >= delay for delay, took in ran)


def test_a_completion_that_lasts_does_not_hold_up_the_loop(loop):
    released = threading.Event()
    run_on(loop, lambda: loop.complete(lambda: released.wait(TIMEOUT_S)))
    assert run_on(loop, lambda: "alive") == "alive", "the standby thread took over"
    released.set()
    assert run_on(loop, lambda: "still") == "still"


def test_held_up_again_and_again(loop):
    released = threading.Event()
    for _ in range(5):
        run_on(loop, lambda: loop.complete(lambda: released.wait(TIMEOUT_S)))
        assert run_on(loop, loop.is_loop_thread)
    released.set()


def test_a_completion_that_says_that_it_will_wait(loop):
    asked = threading.Event()
    answered = threading.Event()

    def waits():
        loop.step_aside()
        asked.set()
        answered.wait(TIMEOUT_S)

    run_on(loop, lambda: loop.complete(waits))
    assert asked.wait(TIMEOUT_S)
    assert run_on(loop, loop.is_loop_thread)
    answered.set()


def test_completions_of_other_threads_wake_the_loop(loop):
    run_on(loop, lambda: None)
    done = threading.Event()
    time.sleep(0.05)  # it sleeps
    loop.complete(done.set)
    assert done.wait(TIMEOUT_S)


def test_stopping_while_a_completion_steps_aside():
    for delay_s in [0.000005 * turn for turn in range(100)]:
        made = Reactor("stepping")
        made.start()
        made.call_soon(lambda made=made: made.complete(made.step_aside))
        time.sleep(delay_s)  # another moment each time
        made.stop()


def test_a_handler_may_not_wait(loop):
    def tries():
        with pytest.raises(RuntimeError, match="must not wait"):
            loop.step_aside()
        return True

    assert run_on(loop, tries)


def test_a_mistake_in_a_handler_does_not_end_the_loop(loop, caplog):
    def fails():
        raise ValueError("on purpose")

    loop.call_soon(fails)
    assert run_on(loop, lambda: 1) == 1
    assert "on purpose" in caplog.text


def test_an_idle_loop_uses_no_cpu(loop):
    run_on(loop, lambda: loop.complete(lambda: None))  # the standby thread is awake, for a while
    used_s = []
    for _ in range(5):
        # one that spins does so each time; other threads of this process have something to do now
        # and then
        before = time.process_time()
        time.sleep(0.5)
        used_s.append(time.process_time() - before)
        if used_s[-1] < 0.01:
            return
    raise AssertionError(f"{used_s} s of CPU in half a second each")


def test_stopping_ends_all_its_threads():
    def threads():
        return [each for each in threading.enumerate() if each.name.startswith("stopping")]

    made = Reactor("stopping")
    made.start()
    run_on(made, lambda: made.complete(lambda: None))
    assert len(threads()) == 2
    made.stop()
    deadline = time.monotonic() + TIMEOUT_S
    while threads() and time.monotonic() < deadline:
        threading.Event().wait(0.001)
    assert not threads()


@pytest.mark.parametrize("library", ["asyncio", "uvloop"])
def test_asyncio_turns_it_and_gives_it_back(library):
    """Sockets, changes of other threads, functions and timers go on through both handovers."""
    new_loop = pytest.importorskip(library).new_event_loop
    reactor = Reactor("lent")
    reactor.start()
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    events = queue.Queue()

    def ready(event):
        if event & READ and reader.recv(64):
            events.put((event & READ, reactor.is_loop_thread(), threading.get_ident()))
        if event & WRITE:
            reactor.change(reader.fileno(), READ)
            events.put((WRITE, reactor.is_loop_thread(), threading.get_ident()))

    def exchange():
        """What happens, from this thread, which is never the loop's."""
        writer.send(b"1")
        seen = [events.get(timeout=TIMEOUT_S)]
        reactor.change(reader.fileno(), READ | WRITE)
        seen.append(events.get(timeout=TIMEOUT_S))
        reactor.change(reader.fileno(), 0)
        run_on(reactor, lambda: None)  # after the change
        writer.send(b"2")
        with pytest.raises(queue.Empty):
            events.get(timeout=0.05)
        reactor.change(reader.fileno(), READ)
        seen.append(events.get(timeout=TIMEOUT_S))
        reactor.call_at(time.monotonic() + 0.01, lambda: events.put("late"))
        assert events.get(timeout=TIMEOUT_S) == "late"
        assert [event for event, *_ in seen] == [READ, WRITE, READ]
        assert all(is_there for _, is_there, _ in seen)
        (thread,) = {thread for *_, thread in seen}
        return thread

    run_on(reactor, lambda: reactor.watch(reader.fileno(), READ, ready))
    before = exchange()
    loop = new_loop()

    async def lend():
        reactor.attach(loop)
        thread = await asyncio.wait_for(asyncio.to_thread(exchange), TIMEOUT_S)
        reactor.detach()
        return thread

    assert loop.run_until_complete(lend()) == threading.get_ident() != before
    loop.close()
    # a thread of its own again, whose number may be that of the first, which has ended
    assert exchange() != threading.get_ident()
    run_on(reactor, lambda: reactor.forget(reader.fileno()))
    writer.send(b"3")
    with pytest.raises(queue.Empty):
        events.get(timeout=0.05)
    reactor.change(reader.fileno(), READ)  # of a socket that is no longer watched
    reactor.stop()
    reader.close()
    writer.close()
