"""Every role of a followed run dies at random, time and again: each event is trained once.

Trainers, the launcher, the generator, and Kafka's brokers, which are stopped for a while. The run
ends with the bits of an undisturbed one that makes the steps of the same journal.
"""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress

import polars as pl
import pytest
from launched_team import Team, steps, wait_until
from test_streams_train import check_same_bits, summary, trained, undisturbed, write_recipe

from forked import Program
from kafka_cluster import Cluster
from pibroch.data.streams.journal import STEPS_PER_FILE
from stream_files import events

KILLS = int(os.environ.get("PIBROCH_SOAK_STREAM_KILLS", "0"))
SEED = int(os.environ.get("PIBROCH_SOAK_SEED", random.SystemRandom().randrange(1 << 30)))
RATE = 200
SECONDS_PER_KILL = 3
FROM = {
    "memory": ["train.cut_every_seconds=0.1", "train.checkpoint_every_seconds=3600"],
    "memory and disk": ["train.cut_every_seconds=0.3"],
    "disk": ["train.cut_every_seconds=0"],
}
TRAINERS = ["rank 0", "rank 1", "both ranks"]


class Run:
    """A launcher and its ranks, which are begun again when the launcher has died."""

    def __init__(self, stack, recipe, folder, source):
        self.folder = folder
        self._team_stack = stack.enter_context(ExitStack())
        self._words = ["--run-dir", folder, "--ranks", 2, "--restarts", 1000, "--follow"]
        for setting in FROM[source]:
            self._words += ["--set", setting]
        self._start(recipe)

    def _start(self, *more):
        self.team = self._team_stack.enter_context(Team(*more, *self._words))

    def kill(self, role):
        """Kill a role; how many processes were there to be killed."""
        pids = self.team.pids()
        if role == "launcher":
            os.kill(self.team.process.pid, signal.SIGKILL)
            wait_until(self.team.is_gone)
            self._team_stack.close()
            self._start("--resume")
            return 1
        victims = pids.values() if role == "both ranks" else [pids.get(int(role[5:]))]
        killed = 0
        for pid in victims:
            with suppress(ProcessLookupError, TypeError):  # it was dead already
                os.kill(pid, signal.SIGKILL)
                killed += 1
        return killed

    def wait_for_a_step(self):
        """Or for a while, where no events are left."""
        begun = steps(self.folder)
        deadline = time.monotonic() + 20
        wait_until(lambda: steps(self.folder) > begun or time.monotonic() > deadline)
        self.lives()

    def end(self):
        os.kill(self.team.process.pid, signal.SIGTERM)
        assert self.team.end() == 128 + signal.SIGTERM, (SEED, self.team.output)

    def lives(self):
        assert self.team.process.poll() is None, (SEED, self.team.end(), self.team.output)
        return True


class Folder:
    """A generator that fills a folder, and dies now and then."""

    roles = (*TRAINERS, "launcher", "generator", "generator")

    def __init__(self, stack, folder, seconds):
        self._out = folder / "data"
        self._stack = stack.enter_context(ExitStack())
        self._words = ["-m", "pibroch", "stream", "generate", "--out", self._out]
        self._words += ["--truth", folder / "truth", "--rate", RATE, "--seconds", seconds]
        self._words += ["--part-seconds", 0.25, "--table-rows", 50]
        self.num_events = RATE * seconds
        self._start()
        wait_until((folder / "truth" / "schema.toml").exists)
        self.settings = {"schema_file": str(folder / "truth" / "schema.toml")}

    def _start(self):
        self._program = self._stack.enter_context(Program(*self._words))

    def kill(self):
        """Kill the generator and give its command again; 0 where it has ended."""
        if self._program.poll() is not None:
            return 0
        self._stack.close()  # by SIGKILL
        self._start()
        return 1

    def check(self, run):
        """Each event once, by its id."""
        assert self._program.end().returncode == 0
        names = {path.name: pl.read_csv(path)["event_id"] for path in self._out.iterdir()}
        ids = Counter()
        for (_, file, line), count in trained(run).items():
            ids[names[file][line - 1]] += count
        assert sorted(ids) == list(range(self.num_events)) and set(ids.values()) == {1}


class Topic:
    """A topic that a thread fills, whose brokers stand still now and then."""

    roles = (*TRAINERS, "launcher", "brokers", "brokers")

    def __init__(self, stack, folder, seconds):
        self._cluster = stack.enter_context(Cluster())
        brokers = self._cluster.brokers
        self.settings = {"kind": "kafka", "brokers": brokers, "topic": "clicks"}
        self.num_events = RATE * seconds
        self._begun = time.monotonic()
        self._send(0, RATE)
        self._thread = threading.Thread(target=self._fill, args=(seconds,))
        self._thread.start()
        stack.callback(self._thread.join)

    def _send(self, first, last):
        messages = [(row["event"], json.dumps(row).encode()) for row in events(first, last)]
        self._cluster.send("clicks", messages)

    def _fill(self, seconds):
        for second in range(1, seconds):
            time.sleep(max(0, self._begun + second - time.monotonic()))
            self._send(RATE * second, RATE * (second + 1))

    def kill(self):
        self._cluster.signal(signal.SIGSTOP)
        time.sleep(2)
        self._cluster.signal(signal.SIGCONT)
        return 1

    def check(self, run):
        """Each event once: its id says its partition and its offset there."""
        self._thread.join()
        count = trained(run)
        assert len(count) == self.num_events and set(count.values()) == {1}


@pytest.mark.skipif(not KILLS, reason="PIBROCH_SOAK_STREAM_KILLS=60 asks for it")
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize(
    ("source", "kind"), [*((source, Folder) for source in FROM), ("memory and disk", Topic)]
)
def test_random_kills_train_each_event_once(tmp_path, source, kind):
    """At any moment, also while they are starting or saving."""
    chance = random.Random(SEED)
    most = -(-KILLS // (1 + len(FROM)))
    killed = Counter()
    folder = tmp_path / "run"
    with ExitStack() as stack:
        (tmp_path / "fed").mkdir()
        feed = kind(stack, tmp_path / "fed", max(20, SECONDS_PER_KILL * most))
        recipe_folder = tmp_path / "recipe"
        recipe_folder.mkdir()
        settings = {"path": str(tmp_path / "fed" / "data")} if kind is Folder else {}
        recipe = write_recipe(recipe_folder, **feed.settings, **settings)
        run = Run(stack, recipe, folder, source)
        wait_until(lambda: run.lives() and steps(folder) > 5)
        roles = []
        while killed.total() < most:
            roles = roles or chance.sample(feed.roles, len(feed.roles))  # each in its turn
            role = roles.pop()
            killed[role] += feed.kill() if role in ("generator", "brokers") else run.kill(role)
            if chance.random() < 0.7:  # else also those that are just starting
                run.wait_for_a_step()
            time.sleep(chance.uniform(0, 1))
        wait_until(lambda: run.lives() and len(trained(folder)) == feed.num_events)
        run.end()
        feed.check(folder)
        print(f"{source}, {kind.__name__}: {dict(killed)}, seed {SEED}")
        assert summary(folder)["samples"] == feed.num_events
        assert summary(folder)["steps"] < STEPS_PER_FILE, "the whole journal is there"
        check_same_bits(folder, undisturbed(folder, 2))
