"""A stream's batches: each event once, in steps that are decided once."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import pibroch
from pibroch.data import EncodedDataset, Loader
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.data.streams.aside import SetAside
from pibroch.data.streams.batches import Offer, StreamOptions, Verdict, decide
from pibroch.data.streams.journal import Journal
from pibroch.errors import CheckpointError, DataError
from stream_files import (
    all_numbers,
    csv_text,
    digest,
    events,
    file_bytes,
    numbers,
    schema,
    stream,
)

KINDS = ["csv", "tsv", "jsonl", "parquet", "csv.gz", "jsonl.zst", "tsv.zst"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_event_comes_once_whatever_the_files_are(tmp_path, kind):
    for place in range(3):
        rows = events(20 * place, 20 * place + 20)
        (tmp_path / f"part-{place}.{kind}").write_bytes(file_bytes(kind, rows))
    batches = list(stream(tmp_path))
    assert all_numbers(batches) == list(range(60))
    assert [batch.batch_size for batch in batches] == [8] * 7 + [4]
    first = batches[0]
    assert first.event_times.tolist() == list(range(1000, 1008))
    assert first.labels.tolist() == [0, 1] * 4 and first.sample_weights.tolist() == [1] * 8
    assert first.offsets[8:].diff().tolist() == [number % 4 for number in range(8)]
    same = next(iter(stream(tmp_path)))
    assert digest(same) == digest(first)
    assert batches[-1].position.samples == 60 and batches[-1].position.step == 8


def offer(samples=0, idle_s=0.0, **changes):
    empty = Offer([], samples, 0, 0.0, False, 0.0, idle_s, False, False, [])
    return replace(empty, **changes)


@pytest.mark.parametrize(
    ("offers", "has_given", "verdict"),
    [
        ([offer(idle_s=9.0), offer(idle_s=9.0)], False, Verdict.WAIT),  # nothing to hand out
        ([offer(idle_s=9.0), offer(idle_s=9.0)], True, Verdict.PAUSE),
        ([offer(idle_s=9.0), offer(idle_s=0.5)], True, Verdict.WAIT),
        ([offer(idle_s=20.0), offer(idle_s=20.0)], True, Verdict.END),
        ([offer(idle_s=20.0), offer(idle_s=20.0, is_waiting=True)], False, Verdict.WAIT),
        ([offer(3, waited_s=0.5), offer(idle_s=9.0)], True, Verdict.WAIT),
        ([offer(3, waited_s=1.0), offer(idle_s=9.0)], True, Verdict.STEP),
        ([offer(3, is_full=True), offer()], False, Verdict.STEP),
        ([offer(3, idle_s=20.0), offer(idle_s=20.0)], False, Verdict.STEP),
        ([offer(waited_s=9.0, bad=3), offer()], False, Verdict.WAIT),  # bad records make no step
        ([offer(3, is_full=True), offer(wants_end=True)], True, Verdict.END),
    ],
)
def test_what_all_ranks_do_next(offers, has_given, verdict):
    options = StreamOptions(8, wait_seconds=1.0, idle_seconds=15.0)
    assert decide(offers, options, has_given) is verdict
    assert decide(offers[::-1], options, has_given) is verdict
    if verdict is Verdict.END and not offers[1].wants_end:  # a stream without an end
        assert decide(offers, replace(options, idle_seconds=None), True) is Verdict.PAUSE


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_at_any_batch(tmp_path, kind):
    for place in range(3):
        rows = events(20 * place, 20 * place + 20)
        (tmp_path / f"part-{place}.{kind}").write_bytes(file_bytes(kind, rows))
    whole = list(stream(tmp_path))
    for place, batch in enumerate(whole):
        later = stream(tmp_path)
        later.load_state_dict(later.state_at(batch.position))
        assert list(map(digest, later)) == list(map(digest, whole[place + 1 :]))


def test_a_file_that_grows_is_read_as_it_grows(tmp_path):
    text = csv_text(events(0, 30))
    path = tmp_path / "log.csv"
    path.write_bytes(text[:5])
    growing = stream(tmp_path, idle_seconds=None, wait_seconds=0.0)
    found = []
    for end in range(140, len(text) + 60, 60):
        with path.open("ab") as file:
            file.write(text[file.tell() : end])
        found += all_numbers(growing)  # until it pauses
        whole_lines = text[:end].count(b"\n") - 1
        assert found == list(range(whole_lines)), "a line counts once its end is there"
    growing.close()
    assert found == list(range(30))


def test_steps_are_the_same_after_a_death_whatever_came_since(tmp_path):
    """What was there when a step was decided is written down."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.csv").write_bytes(csv_text(events(0, 5)))
    first = stream(data, journal=Journal(tmp_path / "journal"))
    before = list(first)
    assert [batch.batch_size for batch in before] == [5]
    first.close()
    (data / "b.csv").write_bytes(csv_text(events(5, 21)))
    again = stream(data, journal=Journal(tmp_path / "journal"))
    after = list(again)
    assert digest(after[0]) == digest(before[0])
    assert [batch.batch_size for batch in after] == [5, 8, 8]
    assert all_numbers(after) == list(range(21))
    again.close()
    third = stream(data, batch_size=3, journal=Journal(tmp_path / "journal"))
    assert list(map(digest, third)) == list(map(digest, after))


def test_a_line_of_the_journal_that_was_cut_off_is_decided_anew(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.csv").write_bytes(csv_text(events(0, 20)))
    list(stream(data, journal=Journal(tmp_path / "journal")))
    (path,) = (tmp_path / "journal").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    again = stream(data, journal=Journal(tmp_path / "journal"))
    assert all_numbers(again) == list(range(20))


def test_files_of_the_journal_that_nobody_needs_go(tmp_path, monkeypatch):
    monkeypatch.setattr("pibroch.data.streams.journal.STEPS_PER_FILE", 2)
    data = tmp_path / "data"  # the journal is none of its sub-folders, which are read
    data.mkdir()
    (data / "a.csv").write_bytes(csv_text(events(0, 60)))
    needed = [0]
    journal = Journal(tmp_path / "journal", lambda: needed[0])
    for batch in stream(data, journal=journal):
        needed[0] = max(0, batch.position.step - 2)
    names = sorted(path.name for path in (tmp_path / "journal").iterdir())
    assert names == ["steps-000000000005.jsonl", "steps-000000000007.jsonl"]
    later = stream(data, journal=Journal(tmp_path / "journal"))
    later.load_state_dict(later.state_at(batch.position))
    assert list(later) == []
    with pytest.raises(DataError, match="each step from 2 on"):
        Journal(tmp_path / "journal").steps_after(1)


def test_ranks_share_partitions_and_one_without_events_gives_none(tmp_path):
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
    (tmp_path / "left" / "a.csv").write_bytes(csv_text(events(0, 10)))
    folders = ("left", "right")
    left, right = on_two_ranks(
        lambda rank, gather: stream(tmp_path, part=(rank, 2), partitions=folders, gather=gather)
    )
    assert [batch.batch_size for batch in left] == [4, 4, 2]
    assert [batch.batch_size for batch in right] == [0, 0, 0]
    assert [batch.position for batch in left] == [batch.position for batch in right]
    assert right[0].first_sample == 4 and right[0].values.numel() == 0


def test_weights_are_shares_of_those_of_all_ranks(tmp_path):
    for name, first in (("left", 0), ("right", 4)):
        (tmp_path / name).mkdir()
        rows = [{**row, "weight": 1.0 + row["event"]} for row in events(first, first + 4)]
        (tmp_path / name / "a.csv").write_bytes(csv_text(rows))
    (left,), (right,) = on_two_ranks(
        lambda rank, gather: stream(
            tmp_path, part=(rank, 2), partitions=("left", "right"), gather=gather
        )
    )
    weights = torch.cat([left.sample_weights, right.sample_weights])
    torch.testing.assert_close(weights, torch.arange(1.0, 9.0) * 8 / 36)


def test_weights_have_a_mean_of_1_in_one_process(tmp_path):
    rows = events(0, 8)
    for row in rows:
        row["weight"] = 0.0 if row["event"] == 3 else float(row["event"])
    (tmp_path / "a.csv").write_bytes(csv_text(rows))
    (batch,) = stream(tmp_path)
    assert batch.sample_weights.mean().item() == pytest.approx(1)
    expected = torch.tensor([0, 1, 2, 0, 4, 5, 6, 7]) * 8 / 25
    torch.testing.assert_close(batch.sample_weights, expected)


def test_batches_have_the_bits_of_a_data_set_of_the_same_records(tmp_path):
    rows = events(0, 60)
    for row in rows:
        row["weight"] = 0.1 + row["event"] % 7 / 3
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.csv").write_bytes(csv_text(rows))
    source = TextSource(folder / "a.csv", schema().separator, schema().quotes, schema().columns)
    options = PrepareOptions(SplitRule.parse("time:1/0/0"))
    prepare([source], schema(), tmp_path / "set", options)
    prepared = Loader(EncodedDataset.open(tmp_path / "set").split("train"), 8)
    assert list(map(digest, stream(folder))) == list(map(digest, prepared))


def test_bad_records_are_set_aside_with_their_reasons(tmp_path):
    lines = csv_text(events(0, 12)).split(b"\n")
    lines[2] = b"1,2,3"
    lines[5] = b'x,1004,1.0,4,u4,,"a"'
    lines[7] = b'1,1006,1.0,6,"u6,,a'
    lines[9] = b"1,soon,1.0,8,u1,,a"
    path = tmp_path / "data" / "a.csv"
    path.parent.mkdir()
    path.write_bytes(b"\n".join(lines))
    aside = tmp_path / "bad.jsonl"
    batches = list(stream(path.parent, aside=SetAside(aside), most_bad_share=0.01))
    assert all_numbers(batches) == [0, 2, 3, 5, 7, 9, 10, 11]
    found = bad_lines(aside)
    assert [each["line"] for each in found] == [3, 6, 8, 10]
    assert [each["text"] for each in found] == [lines[place].decode() for place in (2, 5, 7, 9)]
    assert "3 columns instead of 7" in found[0]["reason"] and "0 or 1" in found[1]["reason"]
    assert "not closed" in found[2]["reason"] and "as at" in found[3]["reason"]
    assert batches[-1].position.bad == 4 and batches[-1].position.records == 12


def test_a_record_is_set_aside_once_whatever_was_killed(tmp_path):
    lines = csv_text(events(0, 12)).split(b"\n")
    lines[4] = b"bad"
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.csv").write_bytes(b"\n".join(lines))
    aside = tmp_path / "bad.jsonl"
    for _ in range(2):  # no journal: all is decided again
        list(stream(data, aside=SetAside(aside), most_bad_share=0.01))
    assert len(bad_lines(aside)) == 1


def test_bad_records_at_the_end_are_set_aside_once(tmp_path):
    """They make no step, and are read again by whoever goes on."""
    data = tmp_path / "data"
    data.mkdir()
    path = data / "a.csv"
    path.write_bytes(csv_text(events(0, 8)) + b"bad\n")
    aside = tmp_path / "bad.jsonl"
    reading = stream(data, aside=SetAside(aside), most_bad_share=1.0)
    (batch,) = reading
    assert [each["line"] for each in bad_lines(aside)] == [10]
    later = stream(data, aside=SetAside(aside), most_bad_share=1.0)
    later.load_state_dict(reading.state_at(batch.position))
    with path.open("ab") as file:
        file.write(csv_text(events(8, 9), header=False))
    assert all_numbers(later) == [8]
    assert [each["line"] for each in bad_lines(aside)] == [10]


def test_too_many_bad_records_end_the_stream(tmp_path):
    rows = [b"bad"] * 11
    (tmp_path / "a.csv").write_bytes(csv_text(events(0, 3)) + b"\n".join(rows) + b"\n")
    with pytest.raises(DataError, match=r"11 bad of 14 records.*a.csv line 5"):
        list(stream(tmp_path, most_bad_share=0.001))


def test_a_position_in_a_data_set_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="none of a stream"):
        stream(tmp_path).load_state_dict({"epoch": 0, "sample": 5})


def test_a_partition_that_is_gone_is_an_error(tmp_path):
    (tmp_path / "a.csv").write_bytes(csv_text(events(0, 3)))
    first = stream(tmp_path, partitions=3)
    (batch,) = first
    later = stream(tmp_path, partitions=("x", "y"))
    later.load_state_dict(first.state_at(batch.position))
    with pytest.raises(DataError, match="without the partition"):
        list(later)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_another_number_of_partitions_is_an_error(tmp_path, count):
    """It shares files out otherwise: some would be trained twice, or never."""
    data = tmp_path / "data"
    data.mkdir()
    for place in range(6):
        (data / f"{place}.csv").write_bytes(csv_text(events(8 * place, 8 * place + 8)))
    first = stream(data, partitions=3, journal=Journal(tmp_path / "journal"))
    *_, last = first
    first.close()
    later = stream(data, partitions=count)
    later.load_state_dict(first.state_at(last.position))
    with pytest.raises(DataError, match="without the partition '0 of 3'"):
        list(later)
    decided = stream(data, partitions=count, journal=Journal(tmp_path / "journal"))
    with pytest.raises(DataError, match="without the partition '0 of 3'"):
        list(decided)


def test_further_folders_may_become_partitions(tmp_path):
    for name, first in (("left", 0), ("right", 8)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.csv").write_bytes(csv_text(events(first, first + 8)))
    before = stream(tmp_path, partitions=("left",))
    (batch,) = before
    later = stream(tmp_path, partitions=("left", "right"))
    later.load_state_dict(before.state_at(batch.position))
    assert all_numbers(later) == list(range(8, 16))


def test_an_end_that_was_asked_for_comes(tmp_path):
    (tmp_path / "a.csv").write_bytes(csv_text(events(0, 30)))
    endless = stream(tmp_path, idle_seconds=None)
    for batch in endless:
        if batch.position.step == 2:
            endless.end()
    assert endless.has_ended and numbers(batch) == list(range(8, 16))


def on_two_ranks(make):
    """The batches of two threads, each of which is a rank."""
    meeting = threading.Barrier(2, timeout=30)
    said = [None, None]

    def run(rank):
        def gather(work):
            said[rank] = work()
            meeting.wait()
            answers = json.loads(json.dumps(said))
            meeting.wait()
            return answers

        return list(make(rank, gather))

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


def bad_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_program_gives_records_itself(tmp_path):
    rows = events(0, 20)
    del rows[4]["user"]

    def records(first):
        yield from rows[first:]

    first = pibroch.data.stream(records, schema(), batch_size=8, folder=tmp_path)
    batches = list(first)
    assert all_numbers(batches) == [*range(4), *range(5, 20)]
    (aside,) = (tmp_path / "bad").iterdir()
    assert [each["line"] for each in bad_lines(aside)] == [5]
    later = pibroch.data.stream(records, schema(), batch_size=8)
    later.load_state_dict(later.state_at(batches[0].position))
    assert list(map(digest, later)) == list(map(digest, batches[1:]))
    rows[8]["user"] = "another"  # of the last range
    changed = pibroch.data.stream(records, schema(), batch_size=8)
    changed.load_state_dict(changed.state_at(batches[0].position))
    with pytest.raises(DataError, match="others now"):
        list(changed)
