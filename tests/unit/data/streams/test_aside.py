"""Bad records: each is kept once, whatever dies and whoever has the folder too."""

import json
from dataclasses import replace

from pibroch.data.streams.aside import SetAside
from pibroch.data.streams.base import BadRecord
from pibroch.data.streams.journal import Journal
from pibroch.errors import StorageError
from stream_files import csv_text, events, stream

BAD = BadRecord("a.csv", 3, "no number", "1,x")


def written(folder):
    """Step and line of all bad records in a folder, sorted."""
    lines = [
        json.loads(line)
        for path in folder.glob("*.jsonl")
        for line in path.read_text().split("\n")
        if line
    ]
    return sorted((each["step"], each["line"]) for each in lines)


def test_runs_that_share_a_folder_leave_each_other_alone(tmp_path):
    first, second = (SetAside(tmp_path / "rank-0.jsonl") for _ in range(2))
    first.go_on_after(0, "monday")
    first.add(1, [BAD])
    second.go_on_after(0, "tuesday")
    second.add(2, [replace(BAD, line=4)])
    again = SetAside(tmp_path / "rank-0.jsonl")
    again.go_on_after(0, "tuesday")
    assert written(tmp_path) == [(1, 3)]


def test_lines_of_ranks_that_are_no_more_are_dropped_with_those_of_others(tmp_path):
    for rank in range(5):
        aside = SetAside(tmp_path / f"rank-{rank}.jsonl")
        aside.go_on_after(0, "run", (rank, 5))
        aside.add(1, [replace(BAD, line=rank)])
        aside.add(2, [replace(BAD, line=rank)])
    for rank in range(2):
        SetAside(tmp_path / f"rank-{rank}.jsonl").go_on_after(1, "run", (rank, 2))
    assert written(tmp_path) == [(1, rank) for rank in range(5)]


def test_a_step_that_is_written_down_again_has_its_lines_once(tmp_path):
    """The journal has refused it, and more has come since."""
    aside = SetAside(tmp_path / "rank-0.jsonl")
    aside.add(1, [BAD])
    aside.add(2, [BAD])
    aside.add(2, [BAD, replace(BAD, line=5)])
    assert written(tmp_path) == [(1, 3), (2, 3), (2, 5)]


class _Killed(SetAside):
    """Of a process that dies when it is to set something aside."""

    def add(self, step, bad):
        if bad:
            raise StorageError("killed")


def test_what_a_process_did_not_come_to_set_aside_is_by_the_next(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    lines = csv_text(events(0, 12)).split(b"\n")
    lines[4] = b"bad"
    (data / "a.csv").write_bytes(b"\n".join(lines))
    journal = Journal(tmp_path / "journal")
    list(stream(data, journal=journal, most_bad_share=0.01))  # the step is decided: rank 0 lives
    journal.close()
    for make in (_Killed, SetAside, SetAside):
        aside = make(tmp_path / "bad" / "rank-0.jsonl")
        reading = stream(data, journal=Journal(tmp_path / "journal"), aside=aside)
        try:
            list(reading)
        except StorageError:
            continue
        finally:
            reading.close()
    assert written(tmp_path / "bad") == [(1, 5)]
