"""The journal of steps: a line is there whole or not at all, and says when it was changed."""

import os
import resource
from contextlib import contextmanager

import pytest

from pibroch.data.streams.base import Range
from pibroch.data.streams.journal import Journal
from pibroch.errors import DataError, StorageError
from stream_files import all_numbers, csv_text, events, numbers, stream


@contextmanager
def no_file_beyond(size):
    """As a disk that is nearly full: a write takes a part, and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def step_ranges(step):
    return [Range("0", f"tag-{step}.csv", 8 * step, 8 * step + 8, step, 1, 77 * step)]


def journal_of(folder, num_steps):
    journal = Journal(folder)
    for step in range(1, num_steps + 1):
        journal.append(step, step_ranges(step))
    return journal


def test_a_step_whose_line_does_not_fit_is_not_given_out(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    lines = csv_text(events(0, 40)).split(b"\n")
    lines[19] = b"bad"  # of the third step
    (data / "a.csv").write_bytes(b"\n".join(lines))
    folder = tmp_path / "kept"
    reading = stream(data, journal=Journal(folder))
    batches = iter(reading)
    first = [next(batches), next(batches)]
    (path,) = folder.iterdir()
    size = path.stat().st_size
    with no_file_beyond(size + size // 4), pytest.raises(StorageError, match="File too large"):
        next(batches)
    assert path.stat().st_size == size, "nothing of the line stays"
    rest = list(reading)  # there is room again
    reading.close()
    assert all_numbers([*first, *rest]) == [each for each in range(40) if each != 18]
    again = stream(data, journal=Journal(folder))
    again.load_state_dict(again.state_at(first[-1].position))
    assert list(map(numbers, again)) == list(map(numbers, rest))


@pytest.fixture
def on_disk(monkeypatch):
    """Bytes of each file that would be there after a loss of power, by path."""
    flushed = {}
    fsync = os.fsync

    def note(descriptor):
        fsync(descriptor)
        flushed[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", note)
    return flushed


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="descriptors have no names here")
def test_what_a_checkpoint_says_survives_a_loss_of_power(tmp_path, on_disk):
    """All lines of the steps before it are on the disk once its state is given out."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.csv").write_bytes(csv_text(events(0, 40)))
    reading = stream(data, journal=Journal(tmp_path / "kept"))
    batches = iter(reading)
    for _ in range(2):
        first = next(batches)
        (path,) = (tmp_path / "kept").iterdir()
        size = path.stat().st_size
        assert on_disk.get(str(path), 0) < size, "a step itself waits for no disk"
        reading.state_at(first.position)
        assert on_disk[str(path)] == path.stat().st_size >= size
    reading.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="descriptors have no names here")
def test_a_file_of_steps_is_on_the_disk_before_the_next_one_begins(tmp_path, on_disk, monkeypatch):
    monkeypatch.setattr("pibroch.data.streams.journal.STEPS_PER_FILE", 3)
    journal = journal_of(tmp_path, 4)
    first, second = sorted(tmp_path.iterdir())
    assert on_disk == {str(first): first.stat().st_size}
    journal.sync()
    assert on_disk[str(second)] == second.stat().st_size
    journal.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line[:20],  # half of it, before another one
        lambda line: line.replace(b"tag-4", b"tag-5"),
        lambda line: bytes(len(line)),
        lambda line: b"{}",
        lambda line: b"7",
    ],
)
def test_a_line_that_was_changed_is_named_as_long_as_it_is_needed(tmp_path, change):
    journal = journal_of(tmp_path, 6)
    journal.close()
    (path,) = tmp_path.iterdir()
    lines = path.read_bytes().split(b"\n")
    lines[3] = change(lines[3])
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=r"line 4 of .*steps-000000000001.jsonl.*damaged"):
        Journal(tmp_path).steps_after(2)
    assert [step for step, _ in Journal(tmp_path).steps_after(5)] == [6]


def test_half_of_a_last_line_is_none_and_the_next_goes_in_its_place(tmp_path):
    journal_of(tmp_path, 3).close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    journal = Journal(tmp_path)
    assert journal.steps_after(0) == [(step, step_ranges(step)) for step in (1, 2)]
    journal.append(3, step_ranges(3))
    journal.close()
    assert [step for step, _ in Journal(tmp_path).steps_after(0)] == [1, 2, 3]


@pytest.mark.parametrize(("needed", "first"), [(0, 1), (1, 1), (2, 3), (3, 3), (4, 5), (9, 7)])
def test_a_file_stays_as_long_as_its_last_step_is_needed(tmp_path, monkeypatch, needed, first):
    monkeypatch.setattr("pibroch.data.streams.journal.STEPS_PER_FILE", 2)
    journal = Journal(tmp_path, lambda: needed)
    for step in range(1, 8):
        journal.append(step, step_ranges(step))
    journal.close()
    assert min(path.name for path in tmp_path.iterdir()) == f"steps-{first:012d}.jsonl"
    steps = [step for step, _ in Journal(tmp_path).steps_after(needed)]
    assert steps == list(range(needed + 1, 8))


def test_records_that_are_skipped_are_for_whoever_goes_on(tmp_path):
    """Of a step that is there, of a later one, and all of a step."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.csv").write_bytes(csv_text(events(0, 40)))
    first = stream(data, journal=Journal(tmp_path / "kept"))
    batches = [batch for batch, _ in zip(first, range(3), strict=False)]
    assert [first.place_of(2, place) for place in (0, 7, 8)] == ["a.csv:10", "a.csv:17", None]
    first.close()
    skip = ("a.csv:13", "a.csv:36", *(f"a.csv:{line}" for line in range(18, 26)))
    second = stream(data, journal=Journal(tmp_path / "kept"), skip=skip, most_bad_share=0.01)
    right = [each for each in range(40) if f"a.csv:{each + 2}" not in skip]
    assert all_numbers(second) == right
    assert second.position.bad == 10 and second.position.samples == 30
    assert second.place_of(2, 3) == "a.csv:14"
    second.close()
    third = stream(data, journal=Journal(tmp_path / "kept"))
    third.load_state_dict(third.state_at(batches[0].position))
    assert all_numbers(third) == right[8:]


def test_a_run_keeps_its_name(tmp_path):
    first = journal_of(tmp_path / "first", 2)
    again = Journal(tmp_path / "first")
    again.steps_after(1)
    other = Journal(tmp_path / "other")
    assert again.run == first.run != other.run
