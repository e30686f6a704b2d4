"""What a rank does in which order, recorded while a case runs.

Of each thread: its spans, the messages that it sends to other ranks, and its calls of embedding
servers and of a central oracle, with the sizes of what they carry and checksums of it. Threads take
turns as they like, so each has an order of its own.
"""

import importlib
import threading
from collections import defaultdict
from contextlib import contextmanager
from unittest.mock import patch
from zlib import crc32

import numpy as np
import role_team
import torch
from world import finish_messages

from pibroch.collectives import Channel
from pibroch.exchange.lookahead.remote_planner import RemotePlanner
from pibroch.observability import trace
from pibroch.servers.client import EmbeddingServers

CALLS = ("exchange", "read_after", "update", "flush")
"""Of embedding servers, by which rows and gradients travel."""
TURNS_VARY = ("pibroch-planner",)
"""Threads whose tasks come from several others: only events of one kind have an order there."""


class Recorder:
    """Events by thread, each ``(what, sizes, checksums)``; it stands where a trace would."""

    def __init__(self):
        self.events = defaultdict(list)
        self._here = threading.local()

    @contextmanager
    def span(self, name):
        self.add(f"span {name}")
        yield

    def add(self, what, *carried):
        carried = () if self._is_gathering else carried
        arrays = [each for part in carried for each in arrays_of(part)]
        sizes = [each.nbytes for each in arrays]
        sums = [crc32(np.ascontiguousarray(each)) for each in arrays]
        thread = threading.current_thread().name
        key = f"{thread}: {what}" if thread in TURNS_VARY else thread
        self.events[key].append((what, sizes, sums))

    @property
    def _is_gathering(self):
        return getattr(self._here, "is_gathering", False)

    @contextmanager
    def gathering(self):
        """Meanwhile messages of this thread count as empty: they hold names that are drawn."""
        self._here.is_gathering = True
        try:
            yield
        finally:
            self._here.is_gathering = False


def arrays_of(carried):
    """All arrays in what is carried: tensors, arrays, numbers, and what holds them."""
    if isinstance(carried, torch.Tensor):
        flat = carried.detach().contiguous().view(-1)
        yield (flat.view(torch.uint8) if len(flat) else flat.to(torch.uint8)).numpy()
    elif isinstance(carried, np.ndarray):
        yield carried
    elif isinstance(carried, bool | int | float | np.generic):
        yield np.asarray(carried)
    elif isinstance(carried, list | tuple):
        for each in carried:
            yield from arrays_of(each)
    elif isinstance(carried, dict):
        yield from arrays_of(list(carried.values()))
    elif hasattr(carried, "__slots__") or hasattr(carried, "__dict__"):
        names = getattr(carried, "__dataclass_fields__", ())
        yield from arrays_of([getattr(carried, name) for name in names])


@contextmanager
def recording():
    """Record what this process does meanwhile."""
    recorder = Recorder()

    def recorded(owner, name, what):
        original = getattr(owner, name)

        def method(self, *args, **options):
            recorder.add(what, args, options)
            return original(self, *args, **options)

        return patch.object(owner, name, method)

    def post(self, going, coming):
        recorder.add("messages", going)
        recorder.add("room", [each.nbytes for each in coming])
        return begin(self, going, coming)

    def gather(self, value):
        with recorder.gathering():
            return plain(self, value)

    def call(self, function, *args, **options):
        recorder.add(f"oracle {function.__name__}", args)
        return ask(self, function, *args, **options)

    begin, plain, ask = Channel.begin_all_to_all, Channel.gather, RemotePlanner._call
    patches = [
        patch.object(Channel, "begin_all_to_all", post),
        patch.object(Channel, "gather", gather),
        patch.object(RemotePlanner, "_call", call),
        recorded(Channel, "all_reduce", "sum"),
        *(recorded(EmbeddingServers, name, f"servers {name}") for name in CALLS),
        patch.object(trace, "_current", recorder),
    ]
    for each in patches:
        each.start()
    try:
        yield recorder
    finally:
        for each in patches:
            each.stop()


def run(channel, module, function, *args, servers=None, central=False, rendezvous=None, **options):
    """Run a case under a recorder; what each thread of this rank did.

    Args:
        channel: of the rank.
        module: with the case.
        function: its name.
        *args: of it.
        servers: how many embedding servers have the rows; none, and nobody is asked to join.
        central: whether a central oracle plans.
        rendezvous: of servers and oracle.
        **options: of the case.
    """
    case = getattr(importlib.import_module(module), function)
    channel.barrier()
    with recording() as recorder:
        if servers is None:
            case(channel, *args, **options)
        else:
            role_team.run(channel, rendezvous, servers, case, *args, central=central, **options)
        finish_messages(channel.ranks)
    return dict(recorder.events)
