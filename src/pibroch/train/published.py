"""What a run has published: the chain of an export and its deltas, and a record of it.

The record lies in the run's directory. A run that goes on reads there whether the newest version
in the folder is its own, so that a delta may begin at it.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from pibroch.config.base import Section
from pibroch.errors import CheckpointError
from pibroch.state.delta_format import checksum_in
from pibroch.state.export_format import WRITE_AGAIN
from pibroch.state.files import explained_refusal
from pibroch.state.versions import numbered, rolled_back_to
from pibroch.train.run_directory import RunDirectory

logger = logging.getLogger(__name__)
RECORD = "published.json"
KEPT_CHAINS = 2
"""At least: the newest, and the one that servers may still be at."""
UNFINISHED = ".unfinished"
"""What names of folders end with until they are whole."""


class Version(Section):
    """The newest version of a chain.

    Attributes:
        chain: numbers of the export and the deltas on it; the last one is this version's.
        version: its name.
        sha256: the checksum in its manifest.
        step: of training.
    """

    chain: tuple[int, ...] = Field(min_length=1)
    version: str
    sha256: str
    step: int = Field(ge=0)


class Root(Section):
    """A whole export, at which a chain begins.

    Attributes:
        number: of it.
        time: when it was published, in seconds since 1970.
    """

    number: int
    time: float


class Record(Section):
    """What a run's directory says of what it published.

    Attributes:
        folder: where.
        dtype: of the rows.
        first: the first number that is the run's own.
        roots: whole exports that are kept, rising.
        last: the newest version; ``None`` where it is not known.
    """

    folder: str
    dtype: str
    first: int
    roots: tuple[Root, ...]
    last: Version | None = None


@dataclass(frozen=True, slots=True)
class PublishedFolder:
    """The folder of numbered exports, and the record; for rank 0.

    Attributes:
        folder: of the exports.
        run: whose directory has the record.
        dtype: of the rows.
        keep_s: how long a chain stays after another one has begun.
    """

    folder: Path
    run: RunDirectory
    dtype: str
    keep_s: float

    def path(self, number: int) -> Path:
        """Where a number lies."""
        return self.folder / str(number)

    def next_number(self) -> int:
        """Behind all that are there, whoever wrote them."""
        return max(numbered(self.folder), default=0) + 1

    def has(self, version: Version) -> bool:
        """Whether a version is there, as it was written."""
        return checksum_in(self.path(version.chain[-1])) == version.sha256

    def go_on(self, since: int | None) -> Version | None:
        """The version on which a run goes on that was started again; cleans up after the last one.

        ``None``, also in the record, where its next one has to be whole: where the newest number is
        not its own, and where rows may have changed that are not marked.

        Args:
            since: the step since which rows are marked; ``None`` for the last version's or an
                earlier one.

        Raises:
            StorageError: when the disk refuses.
        """
        for path in self.folder.glob(f".*{UNFINISHED}"):
            shutil.rmtree(path, ignore_errors=True)
        record = self._record()
        if record is None or record.last is None:
            return None
        last = record.last
        is_own = numbered(self.folder)[-1:] == [last.chain[-1]] and self.has(last)
        if is_own and record.dtype == self.dtype and (since is None or since <= last.step):
            return last
        self._write(record.model_copy(update={"last": None}))
        return None

    def note(self, version: Version) -> None:
        """A version has its name now: say so in the record, and remove what is no longer kept.

        Kept are the newest whole export with its deltas, the one before with its own, all that
        the next chain has replaced a short time ago, as a server may still open these, and all from
        the chain on to which servers were rolled back.

        Raises:
            StorageError: when the disk refuses.
        """
        record = self._record()
        (root, *deltas) = version.chain
        now = time.time()
        if record is None:
            record = Record(folder=self._name(), dtype=self.dtype, first=root, roots=())
        roots = list(record.roots)
        if not deltas:
            roots.append(Root(number=root, time=now))
        wanted = self._rolled_back_to()
        while (
            len(roots) > KEPT_CHAINS
            and roots[1].time + self.keep_s <= now
            and not roots[0].number <= wanted < roots[1].number
        ):
            del roots[0]
        kept = {"roots": tuple(roots), "dtype": self.dtype, "last": version}
        self._write(record.model_copy(update=kept))
        with explained_refusal(self.folder, "export", WRITE_AGAIN):
            for number in numbered(self.folder):
                if record.first <= number < roots[0].number:
                    shutil.rmtree(self.path(number))

    def _rolled_back_to(self) -> int:
        """The version at which servers were asked to stay; -1 for none."""
        try:
            number = rolled_back_to(self.folder)
        except CheckpointError as error:
            logger.warning("%s: no version is kept for it", error.got)
            return -1
        return -1 if number is None else number

    def _name(self) -> str:
        return str(self.folder.resolve())

    def _record(self) -> Record | None:
        content = self.run.read_json(RECORD)
        try:
            record = None if content is None else Record.model_validate(content)
        except ValidationError:
            return None
        return record if record is not None and record.folder == self._name() else None

    def _write(self, record: Record) -> None:
        self.run.write_json(RECORD, record.model_dump(mode="json"))
