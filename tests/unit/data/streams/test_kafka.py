"""Streams of Kafka over the real protocol, with librdkafka's mock cluster in another process."""

import json
import signal
import threading
import time

import pytest

from kafka_cluster import ALL, NOBODY, Cluster
from pibroch.data.streams.aside import SetAside
from pibroch.data.streams.batches import Stream, StreamOptions
from pibroch.data.streams.journal import Journal
from pibroch.data.streams.kafka import Kafka
from pibroch.errors import ConfigError, DataError
from stream_files import all_numbers, decoder, digest, events, schema


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def topic(request):
    return request.node.name.partition("[")[0]


def messages(first, last):
    return [(row["event"], json.dumps(row).encode()) for row in events(first, last)]


def stream(cluster, topic, journal=None, aside=None, part=(0, 1), **options):
    options = StreamOptions(8, **{"idle_seconds": 0.0, **options})
    source = Kafka(cluster.brokers, topic, schema())
    return Stream(source, decoder(), options, part, journal=journal, aside=aside)


def test_each_message_comes_once(cluster, topic):
    cluster.send(topic, messages(0, 50))
    reading = stream(cluster, topic)
    batches = list(reading)
    reading.close()
    assert sorted(all_numbers(batches)) == list(range(50))
    position = batches[-1].position
    assert position.samples == 50 and sorted(position.places) == ["0", "1", "2", "3"]
    assert [position.places[name].end for name in "0123"] == [13, 13, 12, 12]


def test_it_goes_on_at_any_batch_and_after_a_death_with_the_same_steps(cluster, topic, tmp_path):
    cluster.send(topic, messages(0, 50))
    first = stream(cluster, topic, Journal(tmp_path / "journal"))
    whole = list(first)
    first.close()
    cluster.send(topic, messages(50, 60))
    for place in (0, 3, len(whole) - 1):
        later = stream(cluster, topic, Journal(tmp_path / "journal"))
        later.load_state_dict(later.state_at(whole[place].position))
        batches = list(later)
        later.close()
        same = whole[place + 1 :]
        assert list(map(digest, batches[: len(same)])) == list(map(digest, same))
        assert sorted(all_numbers(whole[: place + 1] + batches)) == list(range(60))


def test_brokers_that_are_silent_for_a_while_lose_nothing(cluster, topic):
    cluster.send(topic, messages(0, 20))
    reading = stream(cluster, topic, idle_seconds=5.0, wait_seconds=0.1)
    found = []
    for number, batch in enumerate(reading):
        found += all_numbers([batch])
        if number == 0:
            cluster.signal(signal.SIGSTOP)
            time.sleep(1.5)
            cluster.signal(signal.SIGCONT)
            cluster.send(topic, messages(20, 40))
    while not reading.has_ended:
        found += all_numbers(reading)
    reading.close()
    assert sorted(found) == list(range(40))


def until(reading, count):
    """The numbers of so many events."""
    found = []
    while len(found) < count:
        found += all_numbers(reading)
    return found


def test_a_partition_without_leader_holds_no_other_and_goes_on_with_one(cluster, topic):
    cluster.send(topic, messages(0, 20))
    cluster.set_leader(topic, 1, NOBODY)
    reading = stream(cluster, topic, idle_seconds=None, wait_seconds=0.1)
    assert sorted(until(reading, 15)) == [each for each in range(20) if each % 4 != 1]
    cluster.set_leader(topic, 1, 2)
    assert sorted(until(reading, 5)) == [1, 5, 9, 13, 17]
    reading.end()
    assert list(reading) == [] and reading.has_ended
    reading.close()


def test_a_partition_of_which_nobody_knows_is_named_once(cluster, topic, monkeypatch, caplog):
    monkeypatch.setattr("pibroch.data.streams.kafka.ANSWER_S", 0.5)
    cluster.send(topic, messages(0, 4))
    cluster.set_leader(topic, 1, NOBODY)
    partition = Kafka(cluster.brokers, topic, schema()).open("1")
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        assert partition.next(9) is None and partition.is_waiting
    partition.close()
    assert caplog.text.count(f"no word of partition 1 of '{topic}'") == 1


def test_brokers_that_end_and_begin_again_lose_nothing(cluster, topic):
    """Connections are closed and refused meanwhile, first of one, then of all."""
    cluster.send(topic, messages(0, 20))
    reading = stream(cluster, topic, idle_seconds=None, wait_seconds=0.1)
    found = until(reading, 20)
    for broker in (1, ALL):
        cluster.set_down(broker)

        def begin_again(broker=broker, first=len(found)):
            cluster.set_up(broker)
            cluster.send(topic, messages(first, first + 20))

        timer = threading.Timer(1.0, begin_again)
        timer.start()
        found += until(reading, 20)
        timer.join()
    reading.end()
    assert list(reading) == []
    reading.close()
    assert sorted(found) == list(range(60))


def test_messages_that_the_brokers_dropped_are_an_error(cluster, topic):
    """The mock cluster keeps 5 MB of a partition."""
    cluster.send(topic, messages(0, 8), partition=0)
    first = stream(cluster, topic)
    (batch,) = first
    first.close()
    filler = json.dumps({**events(0, 1)[0], "unread": "x" * 100_000}).encode()
    for _ in range(8):
        cluster.send(topic, [(0, filler)] * 10, partition=0)
    later = stream(cluster, topic)
    later.load_state_dict(later.state_at(batch.position))
    with pytest.raises(DataError, match="do not have any more"):
        list(later)
    later.close()


def test_bad_messages_are_set_aside_with_their_offsets(cluster, topic, tmp_path):
    good = messages(0, 5)
    row = events(5, 6)[0]
    del row["user"]
    bad = [b"", b"{", b"[1]", json.dumps(row).encode(), b'{"clicked": [1]}']
    cluster.send(topic, good[:3], partition=1)
    cluster.send(topic, [(0, text) for text in bad], partition=1)
    cluster.send(topic, good[3:], partition=1)
    aside = tmp_path / "bad.jsonl"
    reading = stream(cluster, topic, aside=SetAside(aside), most_bad_share=0.01)
    assert all_numbers(reading) == list(range(5))
    reading.close()
    lines = [json.loads(line) for line in aside.read_text().splitlines()]
    assert [each["line"] for each in lines] == [3, 4, 5, 6, 7]
    assert "empty" in lines[0]["reason"] and "no `user`" in lines[3]["reason"]


def test_brokers_that_are_not_there_and_topics_are_named(cluster, monkeypatch):
    monkeypatch.setattr("pibroch.data.streams.kafka.ANSWER_S", 1.0)
    with pytest.raises(DataError, match=r"no answer from the brokers 127\.0\.0\.1:9"):
        Kafka("127.0.0.1:9", "clicks", schema())
    with pytest.raises(ConfigError, match="no header"):
        Kafka(cluster.brokers, "clicks", schema(), format="csv")


def test_brokers_that_are_lost_for_good_end_nothing_that_was_read():
    with Cluster() as cluster:
        cluster.send("lost", messages(0, 20))
        reading = stream(cluster, "lost", idle_seconds=None, wait_seconds=0.1)
        found = all_numbers(reading)
        cluster.kill()
        reading.end()
        assert list(reading) == [] and reading.has_ended
        reading.close()
    assert sorted(found) == list(range(20))
