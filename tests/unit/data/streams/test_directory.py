"""Hostile directories: an error that names the place, or set aside; nothing trained wrong."""

import gzip
import json
import os
import shutil
import tracemalloc

import pytest

from pibroch.data.streams import directory, listing
from pibroch.data.streams.aside import SetAside
from pibroch.data.streams.journal import Journal
from pibroch.data.streams.program import stream as stream_of_program
from pibroch.errors import ConfigError, DataError
from stream_files import (
    all_numbers,
    csv_text,
    events,
    file_bytes,
    json_text,
    numbers,
    schema,
    stream,
)
from stream_files import directory as directory_of


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(listing, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(listing, "SHARE_OF_TIME", 0)
    monkeypatch.setattr(directory, "PATIENCE_S", 0.2)


def begun(path, **options):
    """A stream that has read the first file, and waits for more."""
    reading = stream(path, idle_seconds=None, wait_seconds=0.0, **options)
    return reading, all_numbers(reading)


def trained(path):
    """The state when all is trained that is there."""
    reading = stream(path)
    list(reading)
    reading.close()
    return json.loads(json.dumps(reading.state_at(reading.position)))


def goes_on(path, state):
    """Numbers of the events behind a state."""
    reading = stream(path)
    reading.load_state_dict(state)
    found = all_numbers(reading)
    reading.close()
    return found


def reasons(path):
    return [json.loads(line)["reason"] for line in path.read_text().splitlines()]


def test_a_file_that_is_replaced_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(csv_text(events(0, 10)))
    reading, found = begun(tmp_path)
    assert found == list(range(10))
    (tmp_path / "new.tmp").write_bytes(csv_text(events(0, 12)))
    os.replace(tmp_path / "new.tmp", path)
    with pytest.raises(DataError, match=r"a\.csv, which was replaced"):
        list(reading)


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(csv_text(events(0, 10)))
    reading, _ = begun(tmp_path)
    path.write_bytes(csv_text(events(0, 5)))
    with pytest.raises(DataError, match=r"a\.csv, which was cut"):
        list(reading)


def test_a_file_that_comes_too_late_is_an_error(tmp_path):
    (tmp_path / "b.csv").write_bytes(csv_text(events(0, 10)))
    reading, _ = begun(tmp_path)
    (tmp_path / "a.csv").write_bytes(csv_text(events(10, 20)))
    with pytest.raises(DataError, match=r"a\.csv, which came after b\.csv was begun"):
        list(reading)


def test_a_file_that_grows_after_its_end_is_an_error(tmp_path):
    (tmp_path / "a.csv").write_bytes(csv_text(events(0, 10)))
    (tmp_path / "b.csv").write_bytes(csv_text(events(10, 20)))
    reading, found = begun(tmp_path)
    assert found == list(range(20))
    with (tmp_path / "a.csv").open("ab") as file:
        file.write(csv_text(events(20, 21), header=False))
    with pytest.raises(DataError, match=r"a\.csv, which was changed after"):
        list(reading)


def test_a_file_that_came_while_nothing_ran_is_an_error(tmp_path):
    for name, first in (("b", 0), ("d", 10)):
        (tmp_path / f"{name}.csv").write_bytes(csv_text(events(first, first + 10)))
    state = trained(tmp_path)
    for name in ("a", "c"):
        late = tmp_path / f"{name}.csv"
        late.write_bytes(csv_text(events(20, 30)))
        with pytest.raises(DataError, match=rf"{name}\.csv, which came after d\.csv was begun"):
            goes_on(tmp_path, state)
        late.unlink()
    (tmp_path / "e.csv").write_bytes(csv_text(events(20, 30)))
    assert goes_on(tmp_path, state) == list(range(20, 30))


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
def test_a_file_that_changed_while_nothing_ran_is_an_error(tmp_path, kind):
    for place, name in enumerate("abcdefgh"):  # more than each look sees to
        content = file_bytes(kind, events(4 * place, 4 * place + 4))
        (tmp_path / f"{name}.{kind}").write_bytes(content)
    state = trained(tmp_path)
    (tmp_path / f"a.{kind}").write_bytes(file_bytes(kind, events(0, 5)))
    with pytest.raises(DataError, match=rf"a\.{kind}, which was changed after"):
        goes_on(tmp_path, state)


def test_a_file_that_came_before_one_of_a_decided_step_is_an_error(tmp_path):
    """It is before what the journal has, and behind the position."""
    data = tmp_path / "data"
    data.mkdir()
    for name, first in (("a", 0), ("c", 8)):
        (data / f"{name}.csv").write_bytes(csv_text(events(first, first + 8)))
    reading = stream(data, journal=Journal(tmp_path / "journal"))
    first, second = reading
    reading.close()
    (data / "b.csv").write_bytes(csv_text(events(20, 30)))
    later = stream(data, journal=Journal(tmp_path / "journal"))
    later.load_state_dict(later.state_at(first.position))
    batches = iter(later)
    assert numbers(next(batches)) == numbers(second)
    with pytest.raises(DataError, match=r"b\.csv, which came after c\.csv was begun"):
        next(batches)


def test_a_file_without_records_was_read_all_the_same(tmp_path):
    """Its end is in no range of its own."""
    (tmp_path / "a.csv").write_bytes(csv_text([]))
    (tmp_path / "b.csv").touch()
    (tmp_path / "c.csv").write_bytes(csv_text(events(0, 8)))
    state = trained(tmp_path)
    assert state["places"]["0 of 1"][-1] == {"a.csv": len(csv_text([])), "b.csv": 0}
    assert goes_on(tmp_path, state) == []
    (tmp_path / "b.csv").write_bytes(csv_text(events(8, 10)))
    with pytest.raises(DataError, match=r"b\.csv, which was changed after .* at 0 bytes"):
        goes_on(tmp_path, state)


def test_files_that_ended_may_be_removed_at_any_time(tmp_path):
    for place in range(6):
        rows = events(8 * place, 8 * place + 8)
        (tmp_path / f"{place}.csv").write_bytes(csv_text(rows))
    reading = stream(tmp_path, idle_seconds=None, wait_seconds=0.0)
    found = []
    for batch in reading:
        found += numbers(batch)
    assert found == list(range(48))
    for place in (3, 0, 4):
        (tmp_path / f"{place}.csv").unlink()
    (tmp_path / "6.csv").write_bytes(csv_text(events(48, 56)))
    (batch,) = reading
    assert numbers(batch) == list(range(48, 56))
    state = reading.state_at(batch.position)
    assert sorted(state["places"]["0 of 1"][-1]) == ["1.csv", "2.csv", "5.csv"]
    (tmp_path / "1.csv").unlink()
    (tmp_path / "7.csv").write_bytes(csv_text(events(56, 60)))
    assert goes_on(tmp_path, state) == list(range(56, 60))


def test_a_file_that_is_removed_before_it_was_read_is_an_error(tmp_path):
    for name, first in (("a", 0), ("b", 8), ("c", 16)):
        (tmp_path / f"{name}.csv").write_bytes(csv_text(events(first, first + 8)))
    partition = directory_of(tmp_path).open("0 of 1")
    assert partition.next(8).range.file == "a.csv"
    assert partition.next(8).range.file == "b.csv"
    (tmp_path / "c.csv").unlink()
    with pytest.raises(DataError, match=r"c\.csv, which was removed before it was read"):
        partition.next(8)


def test_sub_folders_are_read_and_may_go(tmp_path):
    for day in range(3):
        folder = tmp_path / f"dt=2026-01-0{day}"
        folder.mkdir()
        (folder / "part-0.csv").write_bytes(csv_text(events(8 * day, 8 * day + 8)))
        (folder / "_SUCCESS").touch()
    state = trained(tmp_path)
    assert state["records"] == 24
    shutil.rmtree(tmp_path / "dt=2026-01-00")
    (tmp_path / "dt=2026-01-03").mkdir()
    (tmp_path / "dt=2026-01-03" / "part-0.csv").write_bytes(csv_text(events(24, 32)))
    assert goes_on(tmp_path, state) == list(range(24, 32))


@pytest.mark.parametrize("what", ["link to itself", "link to nothing", "pipe"])
def test_what_is_no_file_is_named(tmp_path, what):
    (tmp_path / "a.csv").write_bytes(csv_text(events(0, 8)))
    path = tmp_path / "b.csv"
    if what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if what == "link to itself" else tmp_path / "nothing")
    with pytest.raises(DataError, match=r"b\.csv, which cannot be read"):
        list(stream(tmp_path))


def test_partitions_that_lie_in_each_other_are_refused(tmp_path):
    for folders in (("a", "a/b"), ("a", "./a"), ("b", "c", "."), ("x/../a", "a")):
        with pytest.raises(DataError, match="one in the other"):
            directory_of(tmp_path, folders)
    assert directory_of(tmp_path, ("a", "ab", "b/a")).partitions == ("a", "ab", "b/a")


def test_what_was_not_read_is_said_at_the_end(tmp_path, caplog):
    (tmp_path / "a.csv").write_bytes(csv_text(events(0, 9))[:-3])
    for name in ("_SUCCESS", ".a.csv.crc", "_b.csv", "c.csv.gz.tmp", "d.jsonl~", ".e.parquet"):
        (tmp_path / name).write_bytes(b"something")
    reading = stream(tmp_path)
    assert all_numbers(reading) == list(range(8))
    reading.close()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"{tmp_path / 'a.csv'}: a line without its end, which was not read",
        f"{tmp_path}: not read, as their names are those of files that are being written:"
        " .e.parquet, _b.csv, c.csv.gz.tmp and 1 others",
    ]


@pytest.mark.parametrize("how", ["other", "shorter", "gone"])
def test_what_was_trained_is_compared_when_a_run_goes_on(tmp_path, how):
    path = tmp_path / "a.csv"
    path.write_bytes(csv_text(events(0, 30)))
    first = next(iter(stream(tmp_path)))
    if how == "gone":
        path.unlink()
    else:
        text = csv_text(events(0, 30 if how == "other" else 2))
        path.write_bytes(text.replace(b"u3", b"u9"))
    later = stream(tmp_path)
    later.load_state_dict(later.state_at(first.position))
    with pytest.raises(DataError, match=r"a\.csv from 41 to"):
        list(later)


def test_half_of_a_header_is_waited_for_and_then_named(tmp_path):
    (tmp_path / "a.csv").write_bytes(csv_text([])[:-5])
    (tmp_path / "b.csv").write_bytes(csv_text(events(0, 8)))
    with pytest.raises(DataError, match=r"a\.csv, which ends with half of its header"):
        list(stream(tmp_path))


def test_half_of_a_line_is_no_number(tmp_path):
    """Cut in the middle of a number, a line would be another one."""
    text = csv_text(events(0, 11))
    folder = tmp_path / "events"
    folder.mkdir()
    (folder / "a.csv").write_bytes(text[:-1])
    aside = tmp_path / "bad" / "bad.jsonl"
    assert all_numbers(stream(folder)) == list(range(10))
    (folder / "b.csv").write_bytes(csv_text(events(20, 25)))
    found = all_numbers(stream(folder, aside=SetAside(aside), most_bad_share=0.01))
    assert found == [*range(10), *range(20, 25)]
    assert reasons(aside) == ["a line without its end in a file that others follow"]


@pytest.mark.parametrize("kind", ["csv.gz", "parquet"])
def test_half_of_a_file_is_waited_for_and_then_named(tmp_path, kind):
    content = file_bytes(kind, events(0, 10))
    path = tmp_path / f"a.{kind}"
    path.write_bytes(content[: len(content) // 2])
    (tmp_path / f"b.{kind}").write_bytes(file_bytes(kind, events(10, 20)))
    with pytest.raises(DataError, match=rf"a\.{kind}, which .*though later files are there"):
        list(stream(tmp_path))
    path.write_bytes(content)
    assert all_numbers(stream(tmp_path)) == list(range(20))


def test_what_is_being_written_and_what_is_empty_is_passed_over(tmp_path):
    (tmp_path / "a.csv").write_bytes(csv_text(events(0, 10)))
    (tmp_path / "b.csv").touch()
    (tmp_path / "c.parquet").write_bytes(file_bytes("parquet", events(10, 20)))
    for name in (".d.csv", "_d.csv", "d.csv.tmp", "d.csv.part"):
        (tmp_path / name).write_bytes(b"no,events\n")
    assert all_numbers(stream(tmp_path)) == list(range(20))


def test_a_record_of_100_mb_is_set_aside_in_little_memory(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    lines = csv_text(events(0, 6)).splitlines(keepends=True)
    with (data / "a.csv").open("wb") as file:
        file.writelines(lines[:4])
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b"\n")
        file.writelines(lines[4:])
    aside = tmp_path / "bad.jsonl"
    all_numbers(stream(data, most_bad_share=0.01))  # compiles
    tracemalloc.start()
    batches = list(stream(data, aside=SetAside(aside), most_bad_share=0.01))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all_numbers(batches) == list(range(6)) and peak < 20 << 20
    (line,) = [json.loads(line) for line in aside.read_text().splitlines()]
    assert line["line"] == 5 and "100,000,000 bytes" in line["reason"]
    assert len(line["text"]) == 200
    for place, batch in enumerate(batches):
        later = stream(data)
        later.load_state_dict(later.state_at(batch.position))
        assert all_numbers(later) == all_numbers(batches[place + 1 :])


def test_columns_may_move_and_not_go(tmp_path):
    (tmp_path / "a.csv").write_bytes(csv_text(events(0, 4)))
    rows = [line.split(b",", 6) for line in csv_text(events(4, 8)).splitlines()]
    moved = b"\n".join(b",".join(row[i] for i in (3, 4, 0, 1, 2, 5)) for row in rows) + b"\n"
    (tmp_path / "b.csv").write_bytes(moved)
    assert all_numbers(stream(tmp_path)) == list(range(8))
    gone = b"\n".join(b",".join(row[:4]) for row in rows) + b"\n"
    (tmp_path / "c.csv").write_bytes(gone)
    with pytest.raises(DataError, match=r"c\.csv with columns.*a column `user`"):
        list(stream(tmp_path))


def test_a_key_of_json_that_got_another_name_is_not_missing(tmp_path):
    rows = events(0, 40)
    (tmp_path / "a.jsonl").write_bytes(json_text(rows[:20]))
    for row in rows[20:]:
        row["person"] = row.pop("user")
    (tmp_path / "b.jsonl").write_bytes(json_text(rows[20:]))
    with pytest.raises(DataError, match=r"b\.jsonl line 1: no `user`"):
        list(stream(tmp_path, most_bad_share=0.001))


def test_damage_within_a_compressed_file_is_named(tmp_path):
    content = bytearray(gzip.compress(csv_text(events(0, 2000))))
    content[len(content) // 2] ^= 0xFF
    (tmp_path / "a.csv.gz").write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"a\.csv\.gz"):
        list(stream(tmp_path, most_bad_share=1.0))


def test_a_name_that_does_not_say_what_it_is_is_an_error(tmp_path):
    (tmp_path / "events").write_bytes(csv_text(events(0, 4)))
    with pytest.raises(DataError, match="does not say what it is"):
        list(stream(tmp_path))


def test_clocks_that_jump_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: -1e9)
    (tmp_path / "a.csv").write_bytes(csv_text(events(0, 10)))
    os.utime(tmp_path / "a.csv", (0, 0))
    (batch, _) = stream(tmp_path)
    assert numbers(batch) == list(range(8))


def test_what_a_stream_writes_must_not_lie_where_it_reads(tmp_path):
    (tmp_path / "a.csv").write_bytes(csv_text(events(0, 8)))
    with pytest.raises(ConfigError, match="whose files and sub-folders are read"):
        stream_of_program(tmp_path, schema(), batch_size=4, folder=tmp_path / "kept")
