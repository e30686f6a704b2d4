"""Strokes of fate against a run that follows a directory, with tables of raw ids, and publishes.

The run is killed, its disk is full, files come late, go, or have odd names. Then it goes on. At
the end each event was trained once or named, and rows and published versions have the bits of a
run that nothing disturbed and that makes the steps of the same journal.

``PIBROCH_SOAK_RUN_STROKES`` says how many strokes there are.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack

import pytest
from test_streams_train import check_same_bits, summary, trained, undisturbed, write_recipe

from published_versions import check_same
from small_run import start_command
from stream_files import csv_text
from stream_writer import Writer

STROKES = int(os.environ.get("PIBROCH_SOAK_RUN_STROKES", "4"))
STROKES_PER_RUN = min(8, STROKES)
SETTINGS = [
    "embedding.rows.capacity=5",  # of seven users: rows are given and taken all the time
    "data.stream.wait_seconds=0.0",
    "data.stream.most_bad_share=1.0",
    "train.batch_size=4",
    "train.checkpoint_every=3",
    "train.keep=999",
    "train.publish_every_seconds=1e-9",
    "train.publish_compact_every=3",
]
DISK_BYTES = 64 << 20


class Run:
    """A run that is begun again and again.

    Args:
        draw: of what happens.
        folder: for the recipe, the data and the run.
        disk: where the run's folder and what it publishes lie.
    """

    def __init__(self, draw, folder, disk):
        self.folder = disk / "run"
        self.models = disk / "models"
        recipe = write_recipe(folder, partitions=draw.choice([1, 2, 3]))
        (folder / "data").rmdir()  # the writer makes it
        self.writer = Writer(draw, folder / "data")
        self._disk = disk
        self._draw = draw
        self._first = [recipe]
        for setting in [*SETTINGS, f"train.publish_to={self.models}"]:
            self._first += ["--set", setting]

    def go_on(self, meanwhile=None):
        """Train what is there; ``meanwhile`` is called with the process. Exit code and output."""
        has_begun = (self.folder / "config.toml").exists()
        words = ["--resume"] if has_begun else self._first
        words = ["train", *words, "--run-dir", self.folder, "--until-idle", 0.2]
        with start_command(*words) as program:
            if meanwhile is not None:
                meanwhile(program)
            ended = program.end()
        return ended.returncode, ended.stderr

    def read(self):
        code, errors = self.go_on()
        assert code == 0, errors

    def is_named(self, name, why):
        """Whether the run ends by an error, which then names what it should."""
        code, errors = self.go_on()
        words = " ".join(errors.split())
        assert code == 0 or (name in words and why in words), errors
        return code != 0

    def ended(self):
        """Names of files that the newest checkpoint no longer needs."""
        manifests = sorted(self.folder.glob("checkpoints/step-*/manifest.json"))
        if not manifests:
            return []
        places = found(json.loads(manifests[-1].read_text()), "places").values()
        sizes = [dict(each[7] if len(each) > 7 else {}) for each in places]
        return [name for each in sizes for name in each if (self.writer.folder / name).exists()]

    # what may happen

    def death(self):
        delay = self._draw.random()

        def kill(program):
            time.sleep(delay)
            program.send_signal(signal.SIGKILL)

        self.go_on(kill)

    def long_file(self):
        limit = self._draw.randrange(30_000)

        def limited(program):
            resource.prlimit(program.pid, resource.RLIMIT_FSIZE, (limit, limit))

        self.writer.write()
        self.ends_in_words(*self.go_on(limited))

    def full_disk(self):
        """All but some thousand bytes are taken, where this may be arranged."""
        self.writer.write()
        filler = self._disk / "filler"
        if not self._disk.is_mount():
            return self.long_file()
        room = shutil.disk_usage(self._disk).free - self._draw.randrange(60_000)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, room))
        ended = self.go_on()
        filler.unlink()
        return self.ends_in_words(*ended)

    def ends_in_words(self, code, errors):
        assert code == 0 or ("do:" in errors and "bug in pibroch" not in errors), errors

    def old_files_go(self):
        for name in self.ended():
            if self._draw.random() < 0.5:
                (self.writer.folder / name).unlink()

    def late_file(self):
        self.read()
        rows = self.writer.events(5)
        name = self.writer.early_name()
        self.writer.put(name, csv_text(rows))
        if self.is_named(name, "which came after"):
            (self.writer.folder / name).unlink()
            del self.writer.written[name]
            self.writer.finish()
            self.writer.put(self.writer.name("csv"), csv_text(rows))

    def odd_name(self):
        path = os.fsencode(self.writer.folder) + b"/z\xff.csv"
        os.close(os.open(path, os.O_CREAT))
        assert self.is_named(r"z\xff.csv", "not UTF-8")
        os.unlink(path)

    def link_to_itself(self):
        self.writer.finish()
        path = self.writer.folder / self.writer.name("csv")
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(path)
        assert self.is_named(path.name, "cannot be read")
        path.unlink()


def found(tree, name):
    """The value of a key, wherever it is in a tree of JSON; empty where it is not."""
    if isinstance(tree, dict):
        if name in tree:
            return tree[name]
        return next(filter(None, (found(each, name) for each in tree.values())), {})
    return {}


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own where this user may mount one, else a folder."""
    path = tmp_path / "disk"
    path.mkdir()
    with ExitStack() as stack:
        options = f"size={DISK_BYTES}"
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
            stack.callback(subprocess.run, ["umount", "--lazy", str(path)], check=True)
        yield path


@pytest.mark.parametrize("seed", range(STROKES // STROKES_PER_RUN))
def test_a_run_goes_on_from_each_stroke(tmp_path, disk, seed):
    draw = random.Random(seed)
    run = Run(draw, tmp_path, disk)
    writer = run.writer
    writer.put(writer.name("csv"), csv_text(writer.events(20)))
    strokes = [
        run.death,
        run.long_file,
        run.full_disk,
        run.old_files_go,
        run.late_file,
        run.odd_name,
        run.link_to_itself,
    ]
    for _ in range(STROKES_PER_RUN):
        for _ in range(draw.randrange(3)):
            draw.choice([writer.write, writer.grow])()
        stroke = draw.choice(strokes)
        print(stroke.__name__)  # for who sees it fail
        stroke()
    writer.finish()
    run.read()
    count = trained(run.folder)
    assert set(count.values()) == {1}
    bad = [path.read_text() for path in (run.folder / "stream" / "bad").glob("*")]
    assert "".join(bad).count("\n") == writer.num_bad
    assert len(count) == writer.num_events + writer.num_bad
    shutil.rmtree(writer.folder)
    writer.folder.mkdir()
    for name, content in writer.written.items():
        writer.put(name, content)
    config = (run.folder / "config.toml").read_text()
    for old, new in (str(run.models), str(tmp_path / "models")), ("every = 3\n", "every = 1\n"):
        assert old in config
        config = config.replace(old, new)
    # it looks for no further files: some are there again that the run has seen to be gone
    limit = f"train.steps={summary(run.folder)['steps']}"
    expected = undisturbed(run.folder, 1, "--set", limit, config=config)
    check_same_bits(run.folder, expected)
    assert check_same(run.models, expected / "checkpoints")
