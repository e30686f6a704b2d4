"""Who fills a directory that a stream reads, by the rules of ``docs/streams.md``."""

from stream_files import csv_text, events, file_bytes

WHOLE = ["csv", "jsonl", "csv.gz", "jsonl.zst", "parquet"]
GARBAGE = b"no,record\n"


class Writer:
    """Who fills the directory, by the rules."""

    def __init__(self, draw, folder):
        self.folder = folder
        folder.mkdir()
        self.written = {}  # bytes by path below the folder, those of files that are gone, too
        self.num_events = 0
        self.num_bad = 0
        self._draw = draw
        self._has_folders = draw.random() < 0.5
        self._num_files = 0
        self._growing = None  # a path, and the bytes that it lacks

    def name(self, kind):
        """The next name."""
        number = self._num_files
        self._num_files += 1
        name = f"part-{number:04d}.{kind}"
        return f"dt={number // 3:02d}/{name}" if self._has_folders else name

    def early_name(self):
        """A name before all others."""
        self._num_files += 1
        name = f"a{self._num_files}.csv"
        return f"dt=00/{name}" if self._has_folders else name

    def events(self, count):
        first = self.num_events
        self.num_events += count
        return events(first, self.num_events)

    def put(self, name, content):
        """A whole file appears."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        new = path.with_name(f"{path.name}.tmp")
        new.write_bytes(content)
        new.rename(path)
        self.written[name] = content

    def write(self):
        """Do something that is allowed."""
        self.finish()
        if self._draw.random() < 0.3:
            self._write_nothing()
        kind = self._draw.choice(WHOLE)
        name = self.name(kind)
        rows = self.events(self._draw.randrange(20))
        if kind == "csv" and self._draw.random() < 0.5:
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
            self._growing = name
            self.written[name] = csv_text(rows)
            self.grow()
        elif not rows and kind == "parquet":
            self.put(name, b"")
        else:
            bad = GARBAGE * (kind == "csv" and self._draw.random() < 0.5)
            self.num_bad += bool(bad)
            self.put(name, file_bytes(kind, rows) + bad)

    def grow(self):
        """Append to the file that grows, cut wherever it falls."""
        if self._growing is not None:
            content = self.written[self._growing]
            with (self.folder / self._growing).open("ab") as file:
                begin = file.tell()
                file.write(content[begin : begin + self._draw.randrange(len(content))])
                if file.tell() == len(content):
                    self._growing = None

    def finish(self):
        """Append all that the file that grows lacks."""
        if self._growing is not None:
            (self.folder / self._growing).write_bytes(self.written[self._growing])
            self._growing = None

    def restore(self, name):
        """Put a file back as it was, by another inode."""
        self.put(name, self.written[name])

    def _write_nothing(self):
        kind = self._draw.choice(["_SUCCESS", ".a.csv", "b.csv.tmp", "empty"])
        if kind == "empty":
            self.put(self.name("csv"), b"")
        else:
            (self.folder / kind).write_bytes(b"nothing to read\n")
