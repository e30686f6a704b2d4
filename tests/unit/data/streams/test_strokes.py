"""Strokes of fate against a directory and its reader: each event is trained once, or named.

Files come whole, grow, are empty or go; the reader dies, and its disk is full; others break the
rules: then the error names the file, and what broke is mended. At the end each event was in one
step, and an undisturbed reader makes the same steps of the same files.

``PIBROCH_SOAK_STREAM_STROKES`` says how many strokes there are.
"""

import json
import os
import random
import resource
import shutil
from contextlib import contextmanager
from itertools import islice

import pytest

from pibroch.data.streams import directory, listing
from pibroch.data.streams.aside import SetAside
from pibroch.data.streams.journal import Journal
from pibroch.errors import DataError, StorageError
from stream_files import csv_text, digest, numbers, stream
from stream_writer import Writer

STROKES = int(os.environ.get("PIBROCH_SOAK_STREAM_STROKES", "12"))
STROKES_PER_RUN = 6
KEPT = 4
"""Newest states, from which a reader may go on."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(listing, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(listing, "SHARE_OF_TIME", 0)
    monkeypatch.setattr(directory, "PATIENCE_S", 0.0)


class Reader:
    """Who reads, dies, and goes on from a state that was saved."""

    def __init__(self, draw, writer, work, num_partitions):
        self.digests = {}
        self.numbers = {}
        self.states = [None]
        self.work = work
        self._draw = draw
        self._writer = writer
        self._num_partitions = num_partitions
        self.begin(None)

    def begin(self, state):
        self._stream = stream(
            self._writer.folder,
            partitions=self._num_partitions,
            journal=Journal(self.work / "journal"),
            aside=SetAside(self.work / "bad" / "rank-0.jsonl"),
            wait_seconds=0.0,
            most_bad_share=1.0,
        )
        if state is not None:
            self._stream.load_state_dict(state)

    def read(self, num_steps=None):
        """So many steps, or all that are there; those that come again are the same."""
        for batch in self._stream if num_steps is None else islice(self._stream, num_steps):
            step = batch.position.step
            assert self.digests.setdefault(step, digest(batch)) == digest(batch), step
            self.numbers[step] = numbers(batch)
            state = json.loads(json.dumps(self._stream.state_at(batch.position)))
            self.states = [*self.states, state][-KEPT:]
        if num_steps is None and not self._stream.has_ended:  # it pauses where it waits
            self.read()

    def die(self):
        """Go on from some state, as another process."""
        self._stream.close()
        place = self._draw.randrange(len(self.states))
        del self.states[place + 1 :]
        self.begin(self.states[-1])

    def ended(self, state):
        """Bytes of files that were read to their end."""
        places = [] if state is None else state["places"].values()
        return {
            name: size
            for each in places
            for name, size in dict(each[7] if len(each) > 7 else {}).items()
            if (self._writer.folder / name).exists()
        }

    def begun(self):
        """Files that are being read at the newest state."""
        state = self.states[-1]
        ended = self.ended(state)
        places = [] if state is None else state["places"].values()
        names = [each[1] for each in places]
        return [name for name in names if name not in ended]


class Strokes:
    """What may happen to a writer and a reader, by name."""

    def __init__(self, draw, writer, reader):
        self._draw = draw
        self._writer = writer
        self._reader = reader
        self.all = [
            self.death,
            self.full_disk,
            self.old_files_go,
            self.late_file,
            self.growth_after_the_end,
            self.odd_name,
            self.link_to_itself,
            self.cut,
            self.replaced,
        ]

    def death(self):
        self._reader.read(self._draw.randrange(4))
        self._reader.die()

    def full_disk(self):
        self._reader.read(1)
        files = sorted((self._reader.work / "journal").iterdir())
        size = files[-1].stat().st_size if files else 0
        with limited(size + self._draw.randrange(300)):
            try:
                self._reader.read()
            except StorageError as error:
                assert "disk with room" in str(error)
        self._reader.die()

    def old_files_go(self):
        """Of a state from which nobody goes on any more, while the reader has it open or not."""
        for name in self._reader.ended(self._reader.states[0]):
            if self._draw.random() < 0.5:
                (self._writer.folder / name).unlink()

    def late_file(self):
        rows = self._writer.events(5)
        name = self._writer.early_name()
        self._writer.put(name, csv_text(rows))
        if self._is_named(name, "which came after"):
            (self._writer.folder / name).unlink()
            del self._writer.written[name]
            self._writer.finish()
            self._writer.put(self._writer.name("csv"), csv_text(rows))

    def growth_after_the_end(self):
        self._reader.read()
        names = [
            name
            for name, size in self._reader.ended(self._reader.states[-1]).items()
            if name.endswith(".csv")
        ]
        if names:
            name = self._draw.choice(names)
            path = self._writer.folder / name
            size = path.stat().st_size
            rows = self._writer.events(3)
            with path.open("ab") as file:
                file.write(csv_text(rows, header=not size))
            assert self._is_named(name, "which was changed after")
            os.truncate(path, size)
            self._writer.finish()
            self._writer.put(self._writer.name("csv"), csv_text(rows))

    def odd_name(self):
        path = os.fsencode(self._writer.folder) + b"/z\xff.csv"
        os.close(os.open(path, os.O_CREAT))
        assert self._is_named(r"z\xff.csv", "not UTF-8")
        os.unlink(path)

    def link_to_itself(self):
        self._writer.finish()
        path = self._writer.folder / self._writer.name("csv")
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(path)
        assert self._is_named(path.name, "cannot be read")
        path.unlink()

    def cut(self):
        self._reader.read()
        if names := self._reader.begun():
            name = self._draw.choice(names)
            self._writer.finish()
            os.truncate(self._writer.folder / name, self._draw.randrange(30))
            assert self._is_named(name, "")
            self._writer.restore(name)

    def replaced(self):
        self._reader.read()
        if names := self._reader.begun():
            name = self._draw.choice(names)
            self._writer.finish()
            self._writer.restore(name)
            self._is_named(name, "which was replaced")  # a later reader sees the same records

    def _is_named(self, name, why):
        """Whether it ends the reader, which has then gone on, perhaps before it saw it."""
        if self._draw.random() < 0.5:
            self._reader.die()
        try:
            self._reader.read()
        except DataError as error:
            assert name in str(error) and why in str(error), str(error)
            is_named = True
        else:
            is_named = False
        self._reader.die()
        return is_named


@contextmanager
def limited(num_bytes):
    """No file is longer meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("seed", range(STROKES // STROKES_PER_RUN))
def test_each_event_is_trained_once_or_named(tmp_path, seed):
    draw = random.Random(seed)
    writer = Writer(draw, tmp_path / "data")
    writer.put(writer.name("csv"), csv_text(writer.events(20)))
    reader = Reader(draw, writer, tmp_path / "run", draw.choice([1, 2, 3]))
    strokes = Strokes(draw, writer, reader)
    for _ in range(STROKES_PER_RUN):
        for _ in range(draw.randrange(4)):
            draw.choice([writer.write, writer.grow, reader.read])()
        stroke = draw.choice(strokes.all)
        print(stroke.__name__)  # for who sees it fail
        stroke()
    writer.finish()
    reader.read()
    trained = [number for step in sorted(reader.numbers) for number in reader.numbers[step]]
    assert sorted(trained) == list(range(writer.num_events))
    bad = [path.read_text() for path in (tmp_path / "run" / "bad").glob("*")]
    assert "".join(bad).count("\n") == writer.num_bad
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(tmp_path / "run" / "journal", undisturbed / "journal")
    shutil.rmtree(writer.folder)
    writer.folder.mkdir()
    for name, content in writer.written.items():
        writer.put(name, content)
    again = Reader(draw, writer, undisturbed, reader._num_partitions)
    again.read(len(reader.digests))
    assert again.digests == reader.digests
