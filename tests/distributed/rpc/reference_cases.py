"""What the tests of references run in the workers."""

import gc
import threading
import time

import torch

from pibroch import rpc
from pibroch.rpc.calls.agent import current_agent
from pibroch.rpc.rref import RRef, remote

SETTLE_S = 60.0
kept: dict = {}


def identity(value):
    return value


def keep(key, value):
    """Hold a value in the worker beyond the call."""
    kept[key] = value


def take(key):
    return kept.pop(key)


def make(number):
    kept["made"] = torch.full((3,), float(number))
    return kept["made"]


def make_reference(number):
    return RRef(make(number))


def reference_on(owner, number):
    return remote(owner, make, (number,))


def read(rref):
    """Value, whether this worker owns it, whether it is the very object that was made here."""
    value = rref.to_here()
    return value.tolist(), rref.is_owner(), value is kept.get("made")


def read_nested(value):
    return [value["list"][0].to_here(), value["list"][1]["inner"].to_here().to_here()]


def fail(text):
    raise KeyError(text)


def pass_along(rref, workers):
    """Hand a reference from worker to worker; the last one reads it."""
    if not workers:
        return read(rref)[0]
    return rpc.rpc_sync(workers[0], pass_along, (rref, workers[1:]))


def pass_and_keep(rref, workers):
    """Each worker in the chain keeps its own reference."""
    kept["chain"] = rref
    if workers:
        rpc.rpc_async(workers[0], pass_and_keep, (rref, workers[1:])).wait()


class Counter:
    """A value with methods."""

    def __init__(self, start=0):
        self.count = start
        self.values = {}

    def add(self, amount, times=1):
        self.count += amount * times
        return self.count

    @rpc.functions.async_execution
    def add_there(self, to, amount):
        return rpc.rpc_async(to, torch.add, (torch.tensor(self.count), amount)).then(
            lambda done: int(done.wait())
        )

    def _private(self):
        return "secret"

    def fail(self, text):
        raise ValueError(text)

    def __call__(self, amount):
        return self.add(amount)

    def __len__(self):
        return self.count

    def __getitem__(self, key):
        return self.values[key]

    def __setitem__(self, key, value):
        self.values[key] = value

    def __contains__(self, key):
        return key in self.values


events: dict = {}


def event(name):
    return events.setdefault(name, threading.Event())


def wait_for_event(name, value):
    assert event(name).wait(120)
    return value


def set_event(name):
    event(name).set()


@rpc.functions.async_execution
def add_later(to, x, y):
    return rpc.rpc_async(to, torch.add, (x, y))


def live_counts():
    return current_agent().packer.references.live_counts()


def settle():
    """Wait until this worker refers to nothing and keeps nothing; returns what is left."""
    kept.clear()
    if not wait_until(lambda: not any(live_counts().values()), 0.2):
        # for references in cycles, such as those of exceptions with their frames; it takes long
        gc.collect()
        wait_until(lambda: not any(live_counts().values()))
    return {kind: count for kind, count in live_counts().items() if count}


def wait_until(condition, timeout_s=SETTLE_S):
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
