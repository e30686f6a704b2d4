"""Streams of Kafka over the real protocol, with librdkafka's mock cluster in another process."""

import json
import signal
import threading
import time
from pathlib import Path

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


def send_between_markers(cluster, topic, first, last):
    """Messages, with markers of transactions between them and behind the last."""
    for number in range(first, last):
        cluster.send(topic, messages(number, number + 1))
        if number % 3 == 0 or number >= last - 4:
            cluster.send_marker(topic, number % 4)


def test_markers_of_transactions_are_no_messages_and_end_is_behind_them(cluster, topic):
    send_between_markers(cluster, topic, 0, 20)
    reading = stream(cluster, topic)
    batches = list(reading)
    reading.close()
    assert reading.has_ended and sorted(all_numbers(batches)) == list(range(20))
    position = batches[-1].position
    assert position.records == 20
    # of five messages each, a marker behind the last, and two before it
    assert [position.places[name].end for name in "0123"] == [7, 6, 6, 7]


@pytest.mark.parametrize("send", [Cluster.send, send_between_markers])
def test_it_goes_on_at_any_batch_and_after_a_death_with_the_same_steps(cluster, send, tmp_path):
    topic = f"goes-on-{send.__name__}"

    def send_some(first, last):
        if send is Cluster.send:
            cluster.send(topic, messages(first, last))
        else:
            send(cluster, topic, first, last)

    send_some(0, 50)
    first = stream(cluster, topic, Journal(tmp_path / "journal"))
    whole = list(first)
    first.close()
    send_some(50, 60)
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
    monkeypatch.setattr("pibroch.data.streams.kafka_consumer.ANSWER_S", 0.5)
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


def test_the_last_messages_are_not_needed_to_go_on_but_the_next_is(cluster, topic):
    """Of the range that was read last the brokers have dropped a part, and nothing behind it."""
    rows = [{**row, "unread": "x" * 100_000} for row in events(0, 60)]
    filler = [(0, json.dumps(row).encode()) for row in rows]
    cluster.send(topic, filler[:8], partition=0)
    first = stream(cluster, topic)
    (batch,) = first
    first.close()
    for each in filler[8:56]:
        cluster.send(topic, [each], partition=0)
    later = stream(cluster, topic)
    later.load_state_dict(later.state_at(batch.position))
    assert all_numbers(later) == list(range(8, 56))
    later.close()


def test_a_topic_that_was_made_again_is_an_error(cluster, topic):
    cluster.send(topic, messages(0, 8), partition=0)
    cluster.send(f"{topic}-again", messages(8, 32), partition=0)
    first = stream(cluster, topic)
    (batch,) = first
    first.close()
    later = stream(cluster, f"{topic}-again")
    later.load_state_dict(later.state_at(batch.position))
    with pytest.raises(DataError, match="whose records are others now"):
        list(later)
    later.close()


def num_clients():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("rdk:main")


def test_all_partitions_have_one_consumer(cluster, topic):
    """A thread ``rdk:main`` each; of connections there are more threads."""
    cluster.send(topic, messages(0, 8))
    before = num_clients()
    reading = stream(cluster, topic)
    assert sorted(all_numbers(reading)) == list(range(8))
    now = num_clients()
    reading.close()
    assert now <= before + 1, "clients of other tests may end meanwhile"


def test_a_backlog_of_one_partition_is_not_kept_for_another(cluster, topic):
    cluster.send(topic, messages(0, 2000), partition=0)
    cluster.send(topic, messages(2000, 2003), partition=1)
    source = Kafka(cluster.brokers, topic, schema())
    partitions = [source.open(name) for name in source.partitions]
    read = dict.fromkeys(source.partitions, 0)
    deadline = time.monotonic() + 20
    while any(each.is_waiting for each in partitions) and time.monotonic() < deadline:
        for each in partitions:
            records = each.next(8)
            read[each.name] += 0 if records is None else records.range.records
            assert source._consumer.num_kept <= 8
    source.close()
    assert read == {"0": 2000, "1": 3, "2": 0, "3": 0}


def test_bad_messages_are_set_aside_with_their_offsets(cluster, topic, tmp_path):
    """Behind a marker of a transaction."""
    good = messages(0, 5)
    cluster.send_marker(topic, 1)
    row = events(5, 6)[0]
    del row["user"]
    bad = [b"", b"{", b"[1]", json.dumps(row).encode(), b'{"clicked": [1]}']
    cluster.send(topic, good[:3], partition=1)
    cluster.send(topic, [(0, text) for text in bad[:3]], partition=1)
    cluster.send_marker(topic, 1)
    cluster.send(topic, [(0, text) for text in bad[3:]], partition=1)
    cluster.send(topic, good[3:], partition=1)
    aside = tmp_path / "bad.jsonl"
    reading = stream(cluster, topic, aside=SetAside(aside), most_bad_share=0.01)
    assert all_numbers(reading) == list(range(5))
    reading.close()
    lines = [json.loads(line) for line in aside.read_text().splitlines()]
    assert [each["line"] for each in lines] == [4, 5, 6, 8, 9]
    assert {each["file"] for each in lines} == {f"{topic}[1]"}
    assert "empty" in lines[0]["reason"] and "no `user`" in lines[3]["reason"]
    assert [each["text"] for each in lines] == ["x", *(text.decode() for text in bad[1:])]


def test_brokers_that_are_not_there_and_topics_are_named(cluster, monkeypatch):
    monkeypatch.setattr("pibroch.data.streams.kafka_consumer.ANSWER_S", 1.0)
    with pytest.raises(DataError, match=r"no answer from the brokers 127\.0\.0\.1:9"):
        Kafka("127.0.0.1:9", "clicks", schema())
    with pytest.raises(ConfigError, match="no header"):
        Kafka(cluster.brokers, "clicks", schema(), format="csv")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"security.protcol": "ssl"}, "security.protcol"),
        ({"fetch.min.bytes": "many"}, "fetch.min.bytes"),
        ({"security.protocol": "nothing"}, "security.protocol"),
        ({"auto.offset.reset": "latest"}, "auto.offset.reset"),
    ],
)
def test_settings_that_are_none_or_not_the_users_are_named(settings, named):
    with pytest.raises(ConfigError, match=named):
        Kafka("127.0.0.1:9", "clicks", schema(), settings=settings)


def test_brokers_that_are_gone_are_told_of_once(caplog, capfd):
    """Of hundreds of attempts to connect."""
    with Cluster() as cluster:
        cluster.send("gone", messages(0, 4))
        often = {"reconnect.backoff.ms": 1, "reconnect.backoff.max.ms": 5}
        source = Kafka(cluster.brokers, "gone", schema(), settings=often)
        options = StreamOptions(8, idle_seconds=None, wait_seconds=0.1)
        reading = Stream(source, decoder(), options)
        found = all_numbers(reading)
        capfd.readouterr()
        cluster.set_down()
        timer = threading.Timer(1.5, reading.end)
        timer.start()
        assert list(reading) == []
        timer.join()
        reading.close()
        lines = [record.message for record in caplog.records if "Kafka" in record.message]
        assert any("refused" in line for line in lines)
        own_log = [line for line in capfd.readouterr().err.splitlines() if line[:1] == "%"]
        assert len(lines) < 10 and not any("consumer" in line for line in own_log)
    assert sorted(found) == list(range(4))


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
