"""The order of a lookahead exchange, driven by random programs: what users may do, in any order."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.exchange.lookahead.window import FeedWindow

ACTIONS = [
    "read",
    "announce",
    "next",
    "next",
    "update",
    "update",
    "deliver",
    "other",
    "write",
    "leave",
    "feed",
]


@dataclass(eq=False)
class Fed:
    batch: object
    feed: int
    number: int = 0


class Driver:
    """Does to a window what an exchange does, and keeps count of what must be true."""

    def __init__(self, lookahead):
        self.window = FeedWindow(lookahead)
        self.feed = None
        self.unannounced = []
        self.admitted = []
        self.looked_up = []
        self.num_numbers = 0
        self.in_flight = self.delivering = None
        self.is_dirty = self.is_open = False

    def act(self, action):
        getattr(self, f"do_{action}")()
        window = self.window
        assert window.feed == self.feed
        assert window.is_open == self.is_open
        assert window.following() is (self.admitted[0] if self.admitted else None)
        assert list(window.upcoming()) == self.admitted[:2]

    def do_feed(self):
        self.do_leave()
        self.feed = self.window.begin_feed()

    def do_read(self):
        step = Fed(object(), self.feed or 0)
        self.window.read(step)
        self.unannounced.append(step)

    def do_announce(self):
        taken = self.window.take_read()
        assert taken == self.unannounced
        for step in taken:
            is_part = self.window.admit(step)
            assert is_part == (step.feed == self.feed)
            if is_part:
                self.num_numbers += 1
                assert step.number == self.num_numbers  # as the oracle counts
                self.admitted.append(step)
        self.unannounced = []
        assert self.window.take_read() == []

    def do_next(self):
        """The next batch of the feed is looked up: planned, unless one is in flight."""
        if not self.admitted:
            return
        step = self.admitted[0]
        taken = self.window.take(step.batch)
        if self.in_flight is not None:
            assert taken is None
            self.do_leave()
            return
        assert taken is step
        self.admitted.pop(0)
        assert self.window.open() == (not self.is_open)
        self.is_open = True
        number = self.window.num_known(step, self.window.lookahead)
        last = self.admitted[: self.window.lookahead][-1:] or [step]
        assert number == last[0].number >= step.number
        self.window.fly(step)
        self.in_flight = step

    def do_other(self):
        """A batch that is not the next one: never planned."""
        others = [step.batch for step in self.admitted[1:2]] + [object()]
        assert all(self.window.take(batch) is None for batch in others)
        self.do_leave()
        self.do_write()

    def do_update(self):
        """Of the step in flight, and of one that was left behind."""
        left = Fed(object(), 0)
        assert not self.window.update(left)
        if self.in_flight is None:
            return
        step = self.in_flight
        self.in_flight = None
        assert self.window.update(step)
        assert not self.window.update(step), "a second time"
        self.window.finish(step)
        self.delivering = step
        self.is_dirty = True

    def do_deliver(self):
        assert self.window.deliver() is self.delivering
        self.delivering = None
        assert self.window.deliver() is None

    def do_write(self):
        assert self.window.must_write_home() == self.is_dirty
        self.is_dirty = False
        assert not self.window.must_write_home()

    def do_leave(self):
        self.do_write()
        self.do_announce()
        left = self.in_flight
        assert self.window.leave() == self.is_open
        self.feed = None
        self.in_flight = None
        self.is_open = False
        self.admitted = []
        assert left is None or not self.window.update(left), (
            "what was in flight is updated unplanned"
        )
        assert not self.window.leave()


@given(st.integers(1, 4), st.lists(st.sampled_from(ACTIONS), max_size=60))
@settings(max_examples=400, deadline=None)
def test_any_program_keeps_the_order(lookahead, actions):
    driver = Driver(lookahead)
    driver.act("feed")
    for action in actions:
        driver.act(action)


def test_a_feed_in_its_order_is_planned_to_its_end():
    driver = Driver(2)
    driver.act("feed")
    for _ in range(6):
        driver.act("read")
    driver.act("announce")
    for number in range(1, 7):
        driver.act("next")
        assert driver.in_flight.number == number
        driver.act("update")
        driver.act("deliver")
    assert driver.window.following() is None
