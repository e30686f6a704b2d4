"""Raw click logs to an encoded dataset: parse into a spool, count what training sees, encode.

1. *parse*: each source in pieces, malformed records counted and left out, columns of codes to the spool (resumable by
   piece)
2. *count*: feature by feature over the training split, in bounded memory: the vocabularies (resumable by feature)
3. *encode*: codes to rows, samples to the splits (resumable by piece)

All happens in ``OUT.partial``; the dataset appears under its name in one step at the end.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pibroch.data.counting import CodeCounter
from pibroch.data.encode import MISSING_CODE, FeatureEncoder
from pibroch.data.parse import ParsedPiece, PieceParser
from pibroch.data.schema import Schema
from pibroch.data.sources import Place, Source
from pibroch.data.splits import SPLITS, TRAIN, SplitRule
from pibroch.data.spool import Spool
from pibroch.data.storage import append_json_line, read_json_lines, storage_errors
from pibroch.data.transform import FIRST_ROW, MISSING_ROW, UNKNOWN_ROW
from pibroch.data.writer import MANIFEST, DatasetWriter, EncodedRows, Totals, write_table
from pibroch.errors import DataError
from pibroch.version import __version__

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with the stage's name and the fraction of it that is done."""

_SHOWN_BAD_RECORDS = 5
_HOPELESS = 0.5
_DONE = "encoded.jsonl"


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """How to prepare.

    Attributes:
        split: which samples train, validate and test.
        max_bad_fraction: more malformed records than this fraction of all are an error.
        overwrite: replace a dataset that is already there.
        piece_bytes: text parsed at once; memory is about ten times this plus the vocabularies.
        count_memory_codes: distinct values counted in memory before they spill to disk.
    """

    split: SplitRule = field(default_factory=SplitRule)
    max_bad_fraction: float = 1e-4
    overwrite: bool = False
    piece_bytes: int = 32 << 20
    count_memory_codes: int = 4_000_000


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What was prepared.

    Attributes:
        samples: per split.
        num_rows: of each feature's table.
        num_bad: malformed records that were left out.
        bad: the first of them, with file, line and reason.
    """

    samples: dict[str, int]
    num_rows: dict[str, int]
    num_bad: int
    bad: tuple[str, ...]


def prepare(
    sources: Sequence[Source],
    schema: Schema,
    out: Path,
    options: PrepareOptions | None = None,
    progress: Progress = lambda stage, fraction: None,
) -> PrepareReport:
    """Encode ``sources`` (in this order) into the folder ``out``. A killed run goes on where it was when called again.

    Raises:
        DataError: input that cannot be used, or a dataset that is already at ``out``.
        StorageError: when the disk refuses.
    """
    options = options or PrepareOptions()
    refuse_existing(out, options.overwrite)
    work = out.with_name(out.name + ".partial")
    with _work_folder(work, _signature(sources, schema, options)):
        spool = Spool(work / "spool", schema)
        _parse(sources, schema, spool, options, progress)
        _refuse_bad(spool, options.max_bad_fraction)
        num_rows = _count(spool, schema, work, options, progress)
        writer = _encode(spool, schema, work, options, progress)
        bad = tuple(spool.bad_records(_SHOWN_BAD_RECORDS))
        provenance = _provenance(sources, options) | {"num_bad": spool.num_bad, "bad": bad}
        writer.finish(num_rows, provenance)
        (work / "dataset" / _DONE).unlink(missing_ok=True)
        publish(work / "dataset", out)
        shutil.rmtree(work)
    return PrepareReport(dict(writer.totals.samples), num_rows, spool.num_bad, bad)


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raise unless ``out`` is free or an older dataset that may be overwritten."""
    if not out.exists():
        return
    if not (out / MANIFEST).exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"--out {out}, which exists and is no dataset", "a new folder", "choose another --out")
    if (out / MANIFEST).exists() and not overwrite:
        raise DataError(f"--out {out}, which already holds a dataset", "a new folder", "pass --overwrite to replace it")


def publish(folder: Path, out: Path) -> None:
    """Give a finished dataset its name; an older one of that name goes."""
    old = out.with_name(out.name + ".old")
    with storage_errors(out):
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            out.rename(old)
        folder.rename(out)
        shutil.rmtree(old, ignore_errors=True)


def _signature(sources: Sequence[Source], schema: Schema, options: PrepareOptions) -> dict[str, Any]:
    """What must be the same for an interrupted run to go on."""
    files = [[str(s.path.resolve()), s.path.stat().st_size, s.path.stat().st_mtime_ns] for s in sources]
    return {
        "version": __version__,
        "sources": files,
        "schema": schema.model_dump(mode="json"),
        "split": list(asdict(options.split).values()),
        "piece_bytes": options.piece_bytes,
    }


@contextmanager
def _work_folder(work: Path, signature: dict[str, Any]) -> Iterator[None]:
    """Open ``OUT.partial`` for this process alone; what another kind of run left there is removed."""
    plan = work / "plan.json"
    with storage_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"{work}, in which another process works", "one at a time", "wait for it") from error
        if read_json_lines(plan) != [signature]:
            for path in work.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
            plan.unlink(missing_ok=True)
            append_json_line(plan, signature)
        else:
            log.info("going on with the interrupted preparation in %s", work)
        for name in ("spool", "dataset", "runs"):
            (work / name).mkdir(exist_ok=True)
        yield
    finally:
        os.close(lock)


def _parse(
    sources: Sequence[Source], schema: Schema, spool: Spool, options: PrepareOptions, progress: Progress
) -> None:
    last = spool.pieces[-1] if spool.pieces else None
    for number, source in enumerate(sources):
        if last is not None and number < last.source:
            continue
        parser = PieceParser(schema, source.columns)
        start = last.end if last is not None and number == last.source else Place()
        for piece in source.pieces(start, options.piece_bytes):
            parsed = parser.parse(piece.text, piece.start.line + 1)
            spool.append(parsed, number, source.path, piece.end)
            if parsed.num_bad > _HOPELESS * (parsed.num_bad + len(parsed.labels)):
                _refuse_bad(spool, options.max_bad_fraction)
            progress("parse", (number + piece.fraction) / len(sources))
    if not spool.num_records and not spool.num_bad:
        raise DataError(f"no records in {', '.join(str(s.path) for s in sources)}", "at least one", "check the files")


def _refuse_bad(spool: Spool, max_bad_fraction: float) -> None:
    total = spool.num_bad + spool.num_records
    if spool.num_bad > max_bad_fraction * total or not spool.num_records:
        shown = "; ".join(spool.bad_records(_SHOWN_BAD_RECORDS))
        raise DataError(
            f"{spool.num_bad} malformed of {total} records: {shown}",
            f"at most a fraction of {max_bad_fraction:g} malformed",
            "correct the input or the schema, or pass a higher --max-bad-fraction to leave such records out",
        )


def _train_codes(spool: Spool, feature_id: int, split: SplitRule) -> Iterator[NDArray[np.uint64]]:
    """Codes of one feature over the training split, piece by piece."""
    first = 0
    for number, piece in enumerate(spool.pieces):
        in_train = split.assign(first, piece.num_records, spool.num_records) == TRAIN
        first += piece.num_records
        if in_train.any():
            codes = spool.codes_of(number, feature_id)
            yield codes.values[in_train if codes.lengths is None else np.repeat(in_train, codes.lengths)]


def _count(spool: Spool, schema: Schema, work: Path, options: PrepareOptions, progress: Progress) -> dict[str, int]:
    """Write the tables' vocabularies and access counts; returns the number of rows of each."""
    num_rows: dict[str, int] = {}
    for feature_id, feature in enumerate(schema.categorical):
        counts_path = work / "dataset" / "tables" / f"{feature.name}.counts.i64"
        if not counts_path.exists():
            pieces = _train_codes(spool, feature_id, options.split)
            if feature.fixed_num_rows is None:
                _count_vocabulary(pieces, feature.min_count, feature.max_rows, work, feature.name, options)
            else:
                encoder = FeatureEncoder(feature)
                counts = np.zeros(encoder.num_rows, np.int64)
                for codes in pieces:
                    counts += np.bincount(encoder.rows(codes), minlength=encoder.num_rows)
                write_table(work / "dataset", feature.name, counts)
        num_rows[feature.name] = counts_path.stat().st_size // 8
        progress("count", (feature_id + 1) / len(schema.categorical))
    return num_rows


def _count_vocabulary(
    pieces: Iterator[NDArray[np.uint64]],
    min_count: int,
    max_rows: int | None,
    work: Path,
    name: str,
    options: PrepareOptions,
) -> None:
    counter = CodeCounter(work / "runs", options.count_memory_codes)
    num_missing = num_all = 0
    for codes in pieces:
        present = codes[codes != MISSING_CODE]
        num_all += len(codes)
        num_missing += len(codes) - len(present)
        counter.add(present)
    codes, kept_counts = counter.most_frequent(min_count, None if max_rows is None else max_rows - FIRST_ROW)
    counter.close()
    counts = np.zeros(FIRST_ROW + len(codes), np.int64)
    counts[FIRST_ROW:] = kept_counts
    counts[MISSING_ROW] = num_missing
    counts[UNKNOWN_ROW] = num_all - counts.sum()
    write_table(work / "dataset", name, counts, codes)


def _encode(spool: Spool, schema: Schema, work: Path, options: PrepareOptions, progress: Progress) -> DatasetWriter:
    """Write the splits; a line in ``encoded.jsonl`` after each piece says how far."""
    done_path = work / "dataset" / _DONE
    done = read_json_lines(done_path)
    writer = DatasetWriter(work / "dataset", schema, Totals(**done[-1]) if done else None)
    encoders = [FeatureEncoder(feature, _codes_of(work, feature.name)) for feature in schema.categorical]
    first = sum(piece.num_records for piece in spool.pieces[: len(done)])
    for number in range(len(done), len(spool.pieces)):
        rows = encode_piece(spool.read(number), encoders)
        assigned = options.split.assign(first, len(rows.labels), spool.num_records)
        for split_id in np.unique(assigned):
            writer.append(SPLITS[split_id], rows.chosen(assigned == split_id))
        append_json_line(done_path, asdict(writer.totals))
        first += len(rows.labels)
        progress("encode", (number + 1) / len(spool.pieces))
    return writer


def encode_piece(parsed: ParsedPiece, encoders: Sequence[FeatureEncoder]) -> EncodedRows:
    """Columns of codes to records of rows."""
    size = len(parsed.labels)
    dense = np.stack(parsed.dense, 1) if parsed.dense else np.empty((size, 0), np.float32)
    columns: list[NDArray[np.int32]] = []
    bags: dict[str, tuple[NDArray[np.int64], NDArray[np.int32]]] = {}
    for codes, encoder in zip(parsed.codes, encoders, strict=True):
        rows = encoder.rows(codes.values)
        if codes.lengths is None:
            columns.append(rows)
        else:
            bags[encoder.feature.name] = (codes.lengths, rows)
    ids = np.stack(columns, 1) if columns else np.empty((size, 0), np.int32)
    return EncodedRows(parsed.labels, dense, ids, bags)


def _codes_of(work: Path, feature: str) -> NDArray[np.uint64] | None:
    path = work / "dataset" / "tables" / f"{feature}.codes.u64"
    return np.fromfile(path, "<u8") if path.exists() else None


def _provenance(sources: Sequence[Source], options: PrepareOptions) -> dict[str, Any]:
    return {
        "sources": [str(source.path) for source in sources],
        "split": asdict(options.split),
        "pibroch": __version__,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }
