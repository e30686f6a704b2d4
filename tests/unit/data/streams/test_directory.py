"""Hostile directories: an error that names the place, or set aside; nothing trained wrong."""

import gzip
import json
import os
import tracemalloc

import pytest

from pibroch.data.streams import directory
from pibroch.data.streams.aside import SetAside
from pibroch.errors import DataError
from stream_files import all_numbers, csv_text, events, file_bytes, json_text, numbers, stream


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(directory, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(directory, "PATIENCE_S", 0.2)


def begun(path, **options):
    """A stream that has read the first file, and waits for more."""
    reading = stream(path, idle_seconds=None, wait_seconds=0.0, **options)
    return reading, all_numbers(reading)


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


def test_half_of_a_line_is_no_number(tmp_path):
    """Cut in the middle of a number, a line would be another one."""
    text = csv_text(events(0, 11))
    (tmp_path / "a.csv").write_bytes(text[:-1])
    aside = tmp_path / "bad" / "bad.jsonl"
    assert all_numbers(stream(tmp_path)) == list(range(10))
    (tmp_path / "b.csv").write_bytes(csv_text(events(20, 25)))
    found = all_numbers(stream(tmp_path, aside=SetAside(aside), most_bad_share=0.01))
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
