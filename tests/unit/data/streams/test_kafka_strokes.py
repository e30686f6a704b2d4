"""A stream of Kafka under random strokes: each event is trained once, each bad message set aside.

Brokers are lost, stand still and change; messages come between markers of transactions, and some
are bad; the process dies at any step, and another one goes on from a checkpoint. What was trained
before a death is made again of the same records.
"""

import json
import os
import random
import signal
import threading
import time
from collections import Counter

import pytest

from kafka_cluster import ALL, Cluster
from pibroch.data.streams.aside import SetAside
from pibroch.data.streams.batches import Stream, StreamOptions
from pibroch.data.streams.journal import Journal
from pibroch.data.streams.kafka import Kafka
from stream_files import decoder, digest, events, numbers, schema

STROKES = int(os.environ.get("PIBROCH_SOAK_KAFKA_STROKES", "8"))
SEED = int(os.environ.get("PIBROCH_SOAK_SEED", random.SystemRandom().randrange(1 << 30)))
TOPIC = "clicks"
PARTITIONS = 4
BAD = (b"", b"{", b'{"clicked": 1}', b"[]", b"null")
MOST_S = 60


class Topic:
    """What was sent, and where the bad messages are."""

    def __init__(self, cluster, chance):
        self._cluster = cluster
        self._chance = chance
        self._ends = [0] * PARTITIONS
        self.num_good = 0
        self.bad = Counter()

    def send(self, partition):
        """Good and bad messages and markers, a good one last."""
        for _ in range(self._chance.randrange(30)):
            kind = self._chance.random()
            if kind < 0.15:
                self._cluster.send_marker(TOPIC, partition)
            elif kind < 0.2:
                self.bad[f"{TOPIC}[{partition}]", self._ends[partition]] += 1
                self._cluster.send(TOPIC, [(0, self._chance.choice(BAD))], partition)
            else:
                self._send_good(partition)
                continue
            self._ends[partition] += 1
        self._send_good(partition)
        if self._chance.random() < 0.3:
            self._cluster.send_marker(TOPIC, partition)
            self._ends[partition] += 1

    def _send_good(self, partition):
        (row,) = events(self.num_good, self.num_good + 1)
        self._cluster.send(TOPIC, [(0, json.dumps(row).encode())], partition)
        self._ends[partition] += 1
        self.num_good += 1


class Run:
    """Processes that read one after the other, and what they have trained."""

    def __init__(self, cluster, folder):
        self._brokers = cluster.brokers
        self._folder = folder
        self.trained = []  # numbers and digest of each step
        self._saved = 0, None
        self._before = {}
        self._begin()

    def _begin(self):
        source = Kafka(self._brokers, TOPIC, schema())
        options = StreamOptions(8, idle_seconds=None, wait_seconds=0.05, most_bad_share=1.0)
        journal = Journal(self._folder / "journal")
        aside = SetAside(self._folder / "bad-0.jsonl")
        self.stream = Stream(source, decoder(), options, journal=journal, aside=aside)
        if self._saved[1] is not None:
            self.stream.load_state_dict(json.loads(self._saved[1]))

    def bad_records(self):
        (path,) = self._folder.glob("bad-*.jsonl")  # with the run's name
        return [json.loads(line) for line in path.read_text().splitlines()]

    def read(self, num_events, most_steps=1 << 30):
        """Train until so many events are trained, or so many steps are."""
        end = threading.Timer(MOST_S, self.stream.end)
        end.start()
        while self._count() < num_events and most_steps > 0:
            assert not self.stream.has_ended, f"{self._count()} of {num_events} events"
            for batch in self.stream:
                step = batch.position.step
                assert step == len(self.trained) + 1
                assert digest(batch) == self._before.setdefault(step, digest(batch)), step
                self.trained.append(numbers(batch))
                self._position = batch.position
                most_steps -= 1
                if self._count() >= num_events or most_steps <= 0:
                    break
        end.cancel()

    def _count(self):
        return sum(map(len, self.trained))

    def save(self):
        if self.trained:
            self._saved = len(self.trained), json.dumps(self.stream.state_at(self._position))

    def die(self):
        """Go on in another process, from the last checkpoint."""
        self.stream.close()
        del self.trained[self._saved[0] :]
        self._begin()


def restore(cluster, broker):
    time.sleep(0.5)
    cluster.set_up(broker)


def strike(cluster, topic, run, chance):
    """One stroke; the stream has what was sent before the next one."""
    stroke = chance.choice(["none", "down", "all down", "still", "leader", "die", "die"])
    for partition in chance.sample(range(PARTITIONS), chance.randrange(1, PARTITIONS + 1)):
        topic.send(partition)
    back = None
    broker = chance.randrange(1, 4)
    if stroke in ("down", "all down"):
        broker = ALL if stroke == "all down" else broker
        cluster.set_down(broker)
        back = threading.Thread(target=restore, args=(cluster, broker))
    elif stroke == "still":
        cluster.signal(signal.SIGSTOP)
        time.sleep(0.3)
        cluster.signal(signal.SIGCONT)
    elif stroke == "leader":
        cluster.set_leader(TOPIC, chance.randrange(PARTITIONS), broker)
    if back is not None:
        back.start()
    if stroke == "die":
        run.read(topic.num_good, chance.randrange(1, 6))
        if chance.random() < 0.5:
            run.save()
            run.read(topic.num_good, chance.randrange(1, 4))
        run.die()
    run.read(topic.num_good)
    if back is not None:
        back.join()
    if chance.random() < 0.3:
        run.save()
    return stroke


@pytest.mark.timeout(600 + 60 * STROKES)
def test_each_event_is_trained_once_whatever_strikes(tmp_path):
    chance = random.Random(SEED)
    struck = Counter()
    with Cluster() as cluster:
        topic = Topic(cluster, chance)
        topic.send(0)
        run = Run(cluster, tmp_path)
        for _ in range(STROKES):
            struck[strike(cluster, topic, run, chance)] += 1
        for _ in range(2):  # bad messages come with the next good ones
            for partition in range(PARTITIONS):
                topic.send(partition)
            run.read(topic.num_good)
            time.sleep(0.5)
        cluster.send(TOPIC, [(0, json.dumps(events(topic.num_good, topic.num_good + 1)[0]))], 0)
        run.read(topic.num_good + 1)
        run.stream.close()
    print(f"{dict(struck)}, seed {SEED}")
    trained = sorted(number for step in run.trained for number in step)
    assert trained == list(range(topic.num_good + 1)), SEED
    lines = run.bad_records()
    assert Counter((line["file"], line["line"]) for line in lines) == topic.bad, SEED
