"""What a run leaves on disk: configuration, versions, metrics, summary, checkpoints."""

from __future__ import annotations

import json
import logging
import os
import platform
import tomllib
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from pibroch.config import RunConfig, to_toml
from pibroch.config.recipes import check_config
from pibroch.errors import ConfigError, StorageError
from pibroch.state.files import saved_steps
from pibroch.storage import (
    append_json_lines,
    is_temporary,
    lines_from_end,
    new_file,
    storage_errors,
)

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""Held by rank 0 while it trains; says who it is. Who can read it can hold it: its owner alone."""
VERSIONS = "versions.json"
DATA = "data.json"
"""Which data: digest of all contents, fingerprint of schema and vocabularies, samples."""
RESTARTS = "restarts.jsonl"
"""A line for each restart of lost processes of the run."""
RANKS = "ranks.json"
logger = logging.getLogger(__name__)
_PLACE = ("a folder to write to", "pass --run-dir")
_LIBRARIES = ("torch", "numba", "numpy", "polars", "safetensors")


def surroundings(**more: int) -> dict[str, object]:
    """What a run depends on besides its settings, or what helps to understand it.

    Versions and the machine, and ``more``.
    """
    from pibroch.collectives.rounding import processor  # loads torch, which readers of runs spare

    versions = {"pibroch": version("pibroch"), "python": platform.python_version()}
    versions |= {name: version(name) for name in _LIBRARIES}
    machine = {"platform": platform.platform(), "processor": processor(), "cpus": os.cpu_count()}
    return {**versions, **machine, **more}


class RunDirectory:
    """The files of a run.

    ``config.toml`` (a recipe in itself), ``versions.json``, ``data.json``, ``metrics.jsonl``,
    ``checkpoints/``, and at the end ``evaluation.json`` and ``summary.json``; in ``recovery/`` what
    was saved beside training since the last checkpoint; in ``stream/`` which records of a stream
    each step had, and the bad ones; in ``lost_ids/`` the ids that lost their rows, when asked
    for; in ``ranks/`` the metrics and the log of each rank but the
    first, in ``servers/`` and ``processors/`` the logs of embedding servers and data processors
    that the run started; in ``trace/`` each rank's trace, when asked for.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.path = path
        self.rank = rank
        self.metrics_path = path / f"ranks/metrics-{rank}.jsonl" if rank else path / "metrics.jsonl"
        self.trace_path = path / "trace" / f"rank{rank}.json"
        self.checkpoints_path = path / "checkpoints"
        self.recovery_path = path / "recovery"
        self.lost_ids_path = path / "lost_ids"
        self.stream_path = path / "stream"

    def log_path(self, rank: int) -> Path:
        """Where a rank that is not the first says what rank 0 says on the console."""
        return self.path / "ranks" / f"rank-{rank}.log"

    def exists(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / "config.toml").is_file()

    def must_be_new(self) -> Self:
        """This directory, if nothing is in it yet.

        A run that was killed, or whose disk was full, as it began leaves empty folders, its lock
        and unfinished files.

        Raises:
            ConfigError: when the folder holds something already.
        """
        if self.path.exists() and (
            not self.path.is_dir() or any(map(_is_kept, self.path.rglob("*")))
        ):
            raise ConfigError(
                f"run directory {self.path}, which is not empty",
                "a new or empty folder",
                "pass --resume to continue the run in it, or another --run-dir",
            )
        return self

    def claim(self) -> None:
        """Keep other processes from training here while this one lives, however it ends.

        Raises:
            ConfigError: when another process trains here.
            StorageError: when the disk refuses.
        """
        with storage_errors(self.path, *_PLACE):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            self._claim = os.fdopen(lock, "a+", encoding="utf-8")
        if fcntl is None:  # not on every system
            return
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._claim.seek(0)
            holder = self._claim.read().strip() or "another process"
            raise ConfigError(
                f"run directory {self.path}, in which {holder} trains",
                "one that no run is using",
                "wait until it has ended, or pass another --run-dir",
            ) from error
        with suppress(OSError):  # a full disk; the lock is held all the same
            self._claim.truncate(0)
            self._claim.write(f"process {os.getpid()} on {platform.node()}\n")
            self._claim.flush()

    def create(self, config: RunConfig) -> None:
        """Begin a run.

        Raises:
            StorageError: when the disk refuses.
        """
        with storage_errors(self.path, *_PLACE):
            self.checkpoints_path.mkdir(parents=True, exist_ok=True)
            for path in filter(is_temporary, self.path.iterdir()):
                path.unlink()
        self.write_text("config.toml", to_toml(config.model_dump()))
        if self.read_json(VERSIONS) is None:
            self.write_json(VERSIONS, surroundings())

    def config(self) -> RunConfig:
        """The resolved configuration of the run begun here.

        Raises:
            ConfigError: when there is none.
        """
        path = self.path / "config.toml"
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"no run in {self.path}", "a run directory", "name one that pibroch train made"
            ) from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                f"{path}, which is no TOML: {error}",
                "the file as it was written",
                "remove it to go on with what the newest checkpoint holds of it, or start anew",
            ) from error
        return check_config(raw, str(path))

    def truncate_metrics(self, last_step: int) -> float:
        """Forget metrics after ``last_step``, which a resumed run will write again.

        Their folder is there afterwards. Records are in the order of steps, so only those at the
        end are read.

        Returns the seconds trained until then.
        """
        seconds = None
        try:
            self.metrics_path.parent.mkdir(parents=True, exist_ok=True)
            with self.metrics_path.open("r+b") as file:
                end = 0
                for begin, line in lines_from_end(file):
                    record = _record(line) if line.endswith(b"\n") else None
                    if (
                        record is None
                        or record["step"] > last_step
                        or record.get("split") == "test"
                    ):
                        continue
                    end = end or begin + len(line)
                    seconds = record.get("seconds")
                    if seconds is not None:
                        break
                file.truncate(end)
        except FileNotFoundError:
            pass
        except OSError as error:
            got = f"{error.strerror} while writing {self.metrics_path}"
            logger.warning("%s: its lines stay, and some will be there twice", got)
        return float(seconds or 0.0)

    def metrics(self) -> list[dict[str, Any]]:
        """All whole records of this rank's metrics; a killed process may have cut the last."""
        records = []
        text = self.metrics_path.read_text(encoding="utf-8") if self.metrics_path.exists() else ""
        for line in text.splitlines():
            record = _record(line)
            if record is None:
                break
            records.append(record)
        return records

    def note_restart(self, reason: str, from_step: int | None, pause_seconds: float = 0.0) -> None:
        """Keep that something was lost and is started again.

        A disk that refuses the line keeps nobody from going on.

        Args:
            reason: what was lost.
            from_step: of the checkpoint from which steps are trained again; ``None`` where none
                are.
            pause_seconds: before the start.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {
            "time": now,
            "reason": reason,
            "from_step": from_step,
            "pause_seconds": pause_seconds,
        }
        try:
            append_json_lines(self.path / RESTARTS, record)
        except StorageError as error:
            logger.warning("%s is not kept: %s", reason, error.got)

    def newest_step(self) -> int:
        """Of the checkpoints, of those by time too; 0 for none."""
        return max([0, *saved_steps(self.checkpoints_path), *saved_steps(self.recovery_path)])

    def note_ranks(self, ranks: int, step: int) -> None:
        """Keep how many ranks train.

        Where they are others than before, that is a line among the restarts.
        """
        before = (self.read_json(RANKS) or {}).get("ranks", ranks)
        if before != ranks:
            self.note_restart(f"ranks: {before} before, {ranks} from here on", step)
        self.note_json(RANKS, {"ranks": ranks})

    @property
    def num_restarts(self) -> int:
        """How often processes of the run, or all, were started again."""
        path = self.path / RESTARTS
        return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0

    def write_summary(self, summary: Summary) -> None:
        """Write ``summary.json``."""
        self.write_json("summary.json", asdict(summary))

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the run; ``None`` where there is none, and for a damaged one.

        The latter with a warning.
        """
        path = self.path / name
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return content
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s is damaged (%s), and taken as lost", path, error)
            return None

    def note_json(self, name: str, content: object) -> None:
        """Write a JSON file that the run can do without: a disk that refuses it is a warning."""
        try:
            self.write_json(name, content)
        except StorageError as error:
            logger.warning("%s: the run goes on without it", error.got)

    def write_json(self, name: str, content: object) -> None:
        """Write a JSON file, in one rename."""
        self.write_text(name, json.dumps(content, indent=1) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file, in one rename.

        Raises:
            StorageError: when the disk refuses.
        """
        path = self.path / name
        with new_file(path, "a disk with room", "free some space") as file:
            path.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")


def _record(line: bytes | str) -> dict[str, Any] | None:
    """A line of metrics; ``None`` for one that a killed process has cut."""
    try:
        record: dict[str, Any] = json.loads(line)
        return record
    except (ValueError, RecursionError):
        return None


def _is_kept(path: Path) -> bool:
    """Whether something in a run directory is more than the beginning of a run leaves."""
    return not path.is_dir() and path.name != LOCK and not is_temporary(path)


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures.

    Attributes:
        steps: updates, over all resumptions.
        samples: samples trained on, by all ranks.
        seconds: spent in training steps; evaluation, saving and compilation are not in it.
        samples_per_second: over these seconds.
        auc, logloss, normalized_entropy: of the test split, ``None`` where undefined or where there
            is none.
        exchange: how embeddings were exchanged.
        world_size: number of processes.
        bytes_sent, bytes_received: between ranks, summed over them, by the processes that ended the
            run; with what travels between ranks and servers or processors, both ways in both
            figures.
        cache_hit_rate: of the rows that ranks read, the share that was in their memory already;
            ``None`` without a cache.
        lookahead: steps in force, the mean over steps; ``None`` where the exchange does not look
            ahead.
        transfers_spared: of the vectors that would have crossed between ranks with samples as they
            were given, the share that did not have to, as expected by who assigned samples to
            ranks; ``None`` where nobody did.
        bytes_by_purpose: what ``bytes_sent`` was for, as far as is known; ``None`` without
            lookahead and processors.
        bytes_by_link: what each rank sent to each a training step to exchange embeddings, ``[W,
            W]``, in the steps of the processes that ended the run; ``None`` for one process, and
            for exchanges that do not count it.
        peak_rss_bytes: the most memory that one of the processes held.
        restarts: of processes of the run, or of all, because some were lost.
        timed_checkpoints: written beside training, by the processes that ended the run.
        timed_checkpoint_seconds: that these took from the thread that trains; they are within
            ``seconds``.
        memory_cuts, memory_cut_seconds: the same of cuts in memory.
        versions_published, publishing_seconds: the same of versions for servers.
        tasks: all figures of the test split by label and name, where there is one.
        raw_ids: of each table of raw ids after the last step, see
            :func:`pibroch.train.meter.totals_of`; ``None`` without such tables.
    """

    steps: int
    samples: int
    seconds: float
    samples_per_second: float
    auc: float | None
    logloss: float | None
    normalized_entropy: float | None
    exchange: str
    world_size: int
    bytes_sent: int
    bytes_received: int
    cache_hit_rate: float | None
    lookahead: float | None
    bytes_by_purpose: dict[str, int] | None
    bytes_by_link: list[list[float] | None] | None
    peak_rss_bytes: int
    restarts: int = 0
    timed_checkpoints: int = 0
    timed_checkpoint_seconds: float = 0.0
    memory_cuts: int = 0
    memory_cut_seconds: float = 0.0
    versions_published: int = 0
    publishing_seconds: float = 0.0
    tasks: dict[str, dict[str, float | None]] | None = None
    raw_ids: dict[str, dict[str, int | float | None]] | None = None
    transfers_spared: float | None = None
