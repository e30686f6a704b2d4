"""Many tables, any interleaving of deliveries, shares, drops, failures and deaths.

No value goes too early, none stays.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.rpc.references.messages import (
    ANY_INCARNATION,
    MessageBatch,
    Peer,
    ValuePlace,
    Wire,
)
from pibroch.rpc.references.table import ReferenceTable
from pibroch.rpc.references.user import Fork, State

NUM_WORKERS = 4


@dataclass(eq=False)
class Handle:
    """A Python object on one worker: a fork, or the owner's own reference.

    ``path``: all lives through which it came.
    """

    life: Peer
    reference: int
    fork: Fork | None
    path: frozenset[Peer]


@dataclass(eq=False)
class InFlight:
    origin: Peer
    to: Peer
    what: str
    item: object
    path: frozenset[Peer] = frozenset()


@dataclass
class World:
    """Workers and a network that delivers in any order; what is sent to the dead is lost."""

    numbers: itertools.count = field(default_factory=lambda: itertools.count(1000))
    tables: dict[Peer, ReferenceTable] = field(default_factory=dict)
    flying: list[InFlight] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    alive: dict[int, Peer] = field(default_factory=dict)  # values that were made: their owners
    discarded: set[int] = field(default_factory=set)
    requests: dict[Fork, Peer] = field(default_factory=dict)  # creations: whom they were sent to

    def __post_init__(self):
        for worker in range(NUM_WORKERS):
            self.be_born(worker)

    def be_born(self, worker):
        life = Peer(worker, next(self.numbers))
        self.tables[life] = ReferenceTable(life)

    def lives(self):
        return sorted(self.tables)

    def send(self, origin, to, what, item, path=frozenset()):
        self.flying.append(InFlight(origin, to, what, item, path))

    # What users do

    def make(self, life):
        reference = next(self.numbers)
        self.tables[life].owners.make(reference)
        self.alive[reference] = life
        self.handles.append(Handle(life, reference, None, frozenset({life})))

    def create(self, life, owner, fails):
        if life == owner:
            return self.make(life)
        reference = next(self.numbers)
        fork = self.tables[life].users.create(
            reference, next(self.numbers), self.known(life, owner)
        )
        self.requests[fork] = owner
        self.send(life, owner, "create", (fork, fails))
        self.handles.append(Handle(life, reference, fork, frozenset({life})))

    def known(self, life, to):
        """What ``life`` knows of the life that it talks to.

        Every other pair learns it from the first answer only.
        """
        hears_of_a_loss = any(
            f.what == "lost" and f.origin.worker == to.worker and f.to == life for f in self.flying
        )
        return (
            to
            if hears_of_a_loss or (life.worker + to.worker) % 2
            else Peer(to.worker, ANY_INCARNATION)
        )

    def share(self, handle, receiver):
        table = self.tables[handle.life]
        child = next(self.numbers)
        to = self.known(handle.life, receiver)
        if handle.fork is None:
            if handle.reference not in table.owners.entries:
                return  # its creator was lost before it came
            table.owners.share(handle.reference, child, to)
            place = ValuePlace(handle.reference, handle.life, handle.life, True)
        elif handle.fork.state is State.GONE:
            return
        else:
            table.users.share(handle.fork, child, to)
            place = handle.fork.place
        wire = Wire(place, "name", handle.life, child)
        self.send(handle.life, receiver, "value", wire, handle.path | {receiver})

    def call_off(self, handle, to):
        """A message that is encoded and never sent."""
        self.share(handle, to)
        if (
            self.flying
            and self.flying[-1].what == "value"
            and self.flying[-1].origin == handle.life
        ):
            self.tables[handle.life].unshare(self.flying.pop().item)

    def speak(self, handle):
        """A call on the value, which nobody waits for: it may come after all forks were dropped."""
        if handle.fork is not None:
            self.send(handle.life, self.now(handle.fork.owner), "speak", handle.fork.place)

    def now(self, peer):
        return self.reached(peer) if peer.incarnation == ANY_INCARNATION else peer

    def reached(self, peer):
        """Whom a message for ``peer`` reaches: the worker in its present life."""
        return next(life for life in self.tables if life.worker == peer.worker)

    def drop(self, handle):
        self.handles.remove(handle)
        table = self.tables[handle.life]
        if handle.fork is None:
            table.owners.release(handle.reference)
        else:
            table.users.release(handle.fork)

    # What happens

    def kill(self, life):
        del self.tables[life]
        self.handles = [handle for handle in self.handles if handle.life != life]
        for other in self.tables:
            self.send(life, other, "lost", None)
        self.be_born(life.worker)

    def deliver(self, flight):
        self.flying.remove(flight)
        table = self.tables.get(flight.to)
        if table is not None:
            getattr(self, f"on_{flight.what}")(table, flight)

    def on_create(self, table, flight):
        fork, fails = flight.item
        ok = not fails and table.owners.created(fork.reference, fork.number, flight.origin)
        if ok:
            self.alive[fork.reference] = table.me
        self.send(table.me, flight.origin, "answer", (fork, ok))

    def on_answer(self, table, flight):
        fork, ok = flight.item
        if ok:
            table.users.created(fork, flight.origin)
        else:
            table.users.creation_failed(fork, RuntimeError("failed"))

    def on_value(self, table, flight):
        wire = flight.item
        got = table.receive(wire)
        assert got is not None
        if got is not False:
            fork = got if isinstance(got, Fork) else None
            self.handles.append(Handle(table.me, wire.place.reference, fork, flight.path))

    def on_speak(self, table, flight):
        table.owners.expects(flight.item)

    def on_news(self, table, flight):
        table.handle_batch(flight.origin.worker, flight.item)

    def on_lost(self, table, flight):
        table.lost(flight.origin)
        for fork in list(table.users.creations.values()):
            if self.requests[fork] == flight.origin:
                table.users.creation_failed(fork, RuntimeError("lost"), owner_lives=False)

    def collect(self):
        for life, table in self.tables.items():
            for to, messages in table.take_messages().items():
                for message in messages:
                    self.send(
                        life,
                        self.reached(to),
                        "news",
                        MessageBatch(life.incarnation, to.incarnation, [message]),
                    )
            self.discarded.update(table.take_discarded())
            self.discarded.update(table.take_failed())

    def check(self):
        """Whatever a living worker holds exists, if all incarnations that it passed still live."""
        lives = self.tables.keys()
        for handle in self.handles:
            if self.alive.get(handle.reference) in lives and handle.path <= lives:
                assert handle.reference not in self.discarded
                assert handle.fork is None or handle.fork.state is not State.GONE
        for flight in self.flying:
            place = flight.item.place if flight.what == "value" else None
            if place and self.alive.get(place.reference) in lives and flight.path <= lives:
                assert place.reference not in self.discarded
        for handle in self.handles:
            # what the owner has confirmed, only the holder's or the owner's death ends
            if handle.fork and handle.fork.state is State.CONFIRMED and handle.fork.owner in lives:
                entry = self.tables[handle.fork.owner].owners.entries.get(handle.reference)
                assert entry is None or not entry.created or handle.fork.number in entry.forks

    def step(self, action):
        kind, a, b, flag = action
        lives = self.lives()
        life = lives[a % len(lives)]
        other = lives[b % len(lives)]
        if kind == "deliver":
            if self.flying:
                self.deliver(self.flying[a % len(self.flying)])
        elif kind == "make":
            self.make(life)
        elif kind == "create":
            self.create(life, other, fails=flag == 0)
        elif kind == "kill":
            self.kill(life)
        elif self.handles:
            handle = self.handles[a % len(self.handles)]
            {"share": self.share, "call_off": self.call_off}.get(kind, lambda *_: None)(
                handle, other
            )
            {"drop": self.drop, "speak": self.speak}.get(kind, lambda *_: None)(handle)
        self.collect()
        self.check()


def actions(kinds):
    small = st.integers(0, 63)
    return st.lists(
        st.tuples(st.sampled_from(kinds), small, small, st.integers(0, 9)), max_size=120
    )


def finish(world, order):
    """Everybody forgets everything and every message arrives: nothing may be left."""
    for handle in list(world.handles):
        world.drop(handle)
    world.collect()
    for number in range(10_000):
        if not world.flying:
            break
        world.deliver(world.flying[order[number % len(order)] % len(world.flying)])
        while world.handles:
            world.drop(world.handles[-1])
        world.collect()
    assert not world.flying
    for table in world.tables.values():
        assert not any(table.counts().values()), table.counts()
    living = {reference for reference, owner in world.alive.items() if owner in world.tables}
    assert living <= world.discarded


PEACE = ["deliver"] * 6 + [
    "make",
    "create",
    "create",
    "share",
    "share",
    "share",
    "call_off",
    "drop",
    "drop",
    "speak",
]
orders = st.lists(st.integers(0, 63), min_size=1, max_size=20)


@settings(max_examples=400, deadline=None)
@given(actions(PEACE), orders)
def test_without_deaths_every_value_lives_exactly_as_long_as_it_is_held(steps, order):
    world = World()
    for action in steps:
        world.step(action)
    finish(world, order)


@settings(max_examples=600, deadline=None)
@given(actions([*PEACE, "kill"]), orders)
def test_with_deaths_the_living_keep_what_they_hold_and_nothing_stays(steps, order):
    world = World()
    for action in steps:
        world.step(action)
    finish(world, order)


@pytest.mark.parametrize("num_deaths", range(8))
def test_long_histories(num_deaths):
    """Long enough for late messages of former incarnations, which short searches seldom reach."""
    kinds = [*PEACE * 3, *["kill"] * num_deaths]
    for seed in range(100):
        rng = random.Random(f"{num_deaths}/{seed}")
        world = World()
        for _ in range(150):
            world.step((rng.choice(kinds), rng.randrange(64), rng.randrange(64), rng.randrange(10)))
        finish(world, [rng.randrange(64) for _ in range(20)])
