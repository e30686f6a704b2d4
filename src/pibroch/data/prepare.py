"""Raw click logs to an encoded dataset: parse into a spool, count what training sees, encode.

1. *parse*: each source in pieces, malformed records counted and left out, columns of codes to the
   spool (resumable by piece)
2. *histories*: sequences of users' earlier records, where the schema has such
3. *count*: table by table over the training split, in bounded memory: the vocabularies
   (resumable by table)
4. *encode*: codes to rows, samples to the splits (resumable by piece)

Where there is no vocabulary to count and no history to build, pieces are encoded as they are
parsed, in one pass.

All happens in ``OUT.partial``; the dataset appears under its name in one step at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pibroch.data import health
from pibroch.data.dataset import SCORE_COLUMNS, EncodedDataset, taken_names
from pibroch.data.encode import FeatureEncoder
from pibroch.data.encoded_pieces import EncodedPieces, append_assigned, encode_piece
from pibroch.data.histories import build_histories
from pibroch.data.parse import PieceParser
from pibroch.data.pieces import Pieces
from pibroch.data.publish import clear, publish, refuse_existing, work_folder
from pibroch.data.schema import Schema
from pibroch.data.sources import Place, RawSource
from pibroch.data.splits import SPLITS, SplitRule
from pibroch.data.spool import Spool
from pibroch.data.storage import read_json_lines
from pibroch.data.vocabularies import Vocabularies
from pibroch.data.vocabulary import count_table
from pibroch.data.writer import DatasetWriter, Totals
from pibroch.errors import DataError
from pibroch.storage import append_json_lines
from pibroch.version import __version__

logger = logging.getLogger(__name__)
Progress = Callable[[str, float], None]
"""Called with the stage's name and the fraction of it that is done."""

_SHOWN_BAD_RECORDS = 3
_HOPELESS = 0.5
_DONE = "encoded.jsonl"


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """How to prepare.

    Attributes:
        split: which samples train, validate and test.
        max_bad_fraction: more malformed records than this fraction of all are an error.
        overwrite: replace a dataset that is already there.
        piece_bytes: text parsed at once; memory is about fifteen times this plus the vocabularies.
        count_memory_codes: distinct values counted in memory before they spill to disk.
        history_bytes: of users' last items held at once, while sequences are built of events.
        vocabularies: those of another dataset, to encode with instead of counting; with its schema.
        has_labels: false for data that are to be scored alone, with ``vocabularies``.
        keep: columns that are passed through, for files of scores.
    """

    split: SplitRule = field(default_factory=SplitRule)
    max_bad_fraction: float = 1e-4
    overwrite: bool = False
    piece_bytes: int = 32 << 20
    count_memory_codes: int = 4_000_000
    history_bytes: int = 512 << 20
    vocabularies: Vocabularies | None = None
    has_labels: bool = True
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What was prepared.

    Attributes:
        samples: per split.
        num_rows: of each table, ``None`` where its ids are raw.
        num_bad: malformed records that were left out.
        bad: the first of them, with file, line and reason.
        warnings: what is probably not meant so, see :mod:`pibroch.data.health`; logged, too.
        unknown: with vocabularies of another dataset, for each feature how many ids they do not
            know, and how many there are.
    """

    samples: dict[str, int]
    num_rows: dict[str, int | None]
    num_bad: int
    bad: tuple[str, ...]
    warnings: tuple[str, ...]
    unknown: dict[str, tuple[int, int]] = field(default_factory=dict)


def prepare(
    sources: Sequence[RawSource],
    schema: Schema,
    out: Path,
    options: PrepareOptions | None = None,
    progress: Progress = lambda stage, fraction: None,
) -> PrepareReport:
    """Encode ``sources`` (in this order) into the folder ``out``.

    A killed run goes on where it was when called again.

    Raises:
        DataError: input that cannot be used, or a dataset that is already at ``out``.
        StorageError: when the disk refuses.
    """
    options = options or PrepareOptions()
    if options.vocabularies is not None and schema != options.vocabularies.schema:
        raise DataError(
            "another schema than that of the vocabularies",
            "the schema of the vocabularies",
            "pass vocabularies.schema",
        )
    if not options.has_labels and options.vocabularies is None:
        raise DataError(
            "data without labels to count vocabularies from",
            "those of a model that is to score them",
            "pass --vocabularies FROM",
        )
    if not options.split.trains and options.vocabularies is None:
        raise DataError(
            "no training samples",
            "some, from which vocabularies are counted",
            "pass --vocabularies FROM",
        )
    if taken := taken_names(options.keep):
        raise DataError(
            f"--keep {taken[0]}, a name that files of scores have already",
            f"columns of other names than {', '.join(SCORE_COLUMNS)}, each once",
            "rename the column, or leave it out",
        )
    of_clicks = [f.name for f in schema.categorical if f.events is not None and f.events.clicks]
    if of_clicks and not options.has_labels:
        raise DataError(
            f"data without labels, and `{of_clicks[0]}`, a sequence of clicks",
            "labels, which say what was clicked",
            "prepare it without --unlabelled",
        )
    _refuse_shared_files(sources, options.split)
    refuse_existing(out, options.overwrite)
    work = out.with_name(out.name + ".partial")
    with work_folder(work, _signature(sources, schema, options)):
        must_count = options.vocabularies is None and any(
            feature.has_vocabulary for feature in schema.categorical
        )
        must_build = any(feature.events is not None for feature in schema.categorical)
        through = _by_spool if must_count or must_build else _directly
        writer, pieces, num_rows = through(sources, schema, work, options, progress)
        bad = tuple(pieces.bad_records(_SHOWN_BAD_RECORDS))
        provenance = _provenance(sources, options) | {"num_bad": pieces.num_bad, "bad": bad}
        writer.finish(num_rows, provenance, has_labels=options.has_labels)
        (work / "dataset" / _DONE).unlink(missing_ok=True)
        publish(work / "dataset", out)
        clear(work)
    dataset = EncodedDataset.open(out)
    warnings = (*pieces.doubts(), *_begun_anew(schema, options), *health.warnings(dataset))
    for warning in warnings:
        logger.warning(warning)
    unknown = {} if options.vocabularies is None else health.unknown_ids(dataset)
    return PrepareReport(
        dict(writer.totals.samples), num_rows, pieces.num_bad, bad, warnings, unknown
    )


def _refuse_shared_files(sources: Sequence[RawSource], split: SplitRule) -> None:
    """Raise DataError for a file that both trains and tests."""
    role_of: dict[Path, int] = {}
    roles = np.repeat(range(len(SPLITS)), split.files if split.kind == "files" else 0)
    for source, role in zip(sources, roles.tolist(), strict=False):
        other = role_of.setdefault(source.path.resolve(), role)
        if other != role:
            raise DataError(
                f"{source.path} both as {SPLITS[other]} and as {SPLITS[role]} data",
                "files of their own for each split",
                "name it once",
            )


def _begun_anew(schema: Schema, options: PrepareOptions) -> Iterator[str]:
    """Say which histories lack what users did before these data, where a model knows it."""
    has_past = options.split.kind == "files" and options.split.trains
    if options.vocabularies is None or has_past:
        return
    for feature in schema.categorical:
        if feature.events is not None:
            yield (
                f"`{feature.name}`: histories begin anew with these files, without what users did"
                " before: name the files of the time before as SRC and these as --test"
            )


def _signature(
    sources: Sequence[RawSource], schema: Schema, options: PrepareOptions
) -> dict[str, object]:
    """What must be the same for an interrupted run to go on.

    A file's time of change (``ctime``) is the kernel's: whoever writes other bytes and sets the
    time of modification back leaves his mark there, at no cost of reading what was read before.
    """
    paths = [
        path for source in sources for path in (source.path, *getattr(source, "more_files", ()))
    ]
    stats = [(path.resolve(), path.stat()) for path in paths]
    files = [
        [str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        for path, stat in stats
    ]
    return {
        "version": __version__,
        "sources": files,
        "read_as": [[type(source).__name__, list(source.columns)] for source in sources],
        "schema": schema.model_dump(mode="json"),
        "split": [
            options.split.kind,
            list(options.split.fractions),
            options.split.seed,
            list(options.split.files),
        ],
        "piece_bytes": options.piece_bytes,
        "has_labels": options.has_labels,
        "keep": list(options.keep),
        "vocabularies": None if options.vocabularies is None else options.vocabularies.fingerprint,
    }


Prepared = tuple[DatasetWriter, Pieces, dict[str, int | None]]
"""All samples, the pieces they came in, and rows of each table."""


def _by_spool(
    sources: Sequence[RawSource],
    schema: Schema,
    work: Path,
    options: PrepareOptions,
    progress: Progress,
) -> Prepared:
    """Parse everything, build sequences, count the vocabularies, then encode."""
    spool = Spool(work / "spool", schema, len(options.keep))
    _parse(sources, schema, spool, options, progress)
    _refuse_bad(spool, options.max_bad_fraction)
    split = options.split.of_files(spool.samples_of_sources(len(sources)))
    for i, feature in enumerate(schema.categorical):
        if feature.events is not None:
            build_histories(spool, i, options.history_bytes, partial(progress, "histories"))
    if options.vocabularies is not None:
        encoders = options.vocabularies.encoders()
        writer = _encode(spool, work, options.keep, split, progress, list(encoders.values()))
        num_rows = {table: encoders[table].num_rows for table in schema.readers}
        _write_counts(writer, num_rows, options.vocabularies.codes)
        return writer, spool, num_rows
    num_rows = {feature.name: feature.fixed_num_rows for feature in schema.owners}
    for i, feature in enumerate(schema.owners):
        if feature.has_vocabulary:
            num_rows[feature.name] = count_table(
                spool, feature.name, split, work, options.count_memory_codes
            )
        progress("count", (i + 1) / len(schema.owners))
    counted = [
        FeatureEncoder(feature, _codes_of(work, feature.table)) for feature in schema.categorical
    ]
    writer = _encode(spool, work, options.keep, split, progress, counted)
    fixed = [feature.name for feature in schema.owners if not feature.has_vocabulary]
    _write_counts(writer, {name: num_rows[name] for name in fixed}, {})
    return writer, spool, num_rows


def _directly(
    sources: Sequence[RawSource],
    schema: Schema,
    work: Path,
    options: PrepareOptions,
    progress: Progress,
) -> Prepared:
    """Encode each piece as soon as it is parsed."""
    vocabularies = options.vocabularies or Vocabularies(schema, "", {})
    encoders = vocabularies.encoders()
    pieces = EncodedPieces(work, schema, list(encoders.values()), options.split, options.keep)
    _parse(sources, schema, pieces, options, progress)
    _refuse_bad(pieces, options.max_bad_fraction)
    pieces.finish(len(sources))
    num_rows = {table: encoders[table].num_rows for table in schema.readers}
    _write_counts(pieces.writer, num_rows, vocabularies.codes)
    return pieces.writer, pieces, num_rows


def _write_counts(
    writer: DatasetWriter,
    num_rows: Mapping[str, int | None],
    codes: Mapping[str, NDArray[np.uint64]],
) -> None:
    """Write the tables of features, but of those with raw ids."""
    tables = {name: rows for name, rows in num_rows.items() if rows is not None}
    for name, counts in writer.count_rows(tables).items():
        writer.write_table(name, counts, codes.get(name))


def _parse(
    sources: Sequence[RawSource],
    schema: Schema,
    spool: Pieces,
    options: PrepareOptions,
    progress: Progress,
) -> None:
    last = spool.pieces[-1] if spool.pieces else None
    for number, source in enumerate(sources):
        if last is not None and number < last.source:
            continue
        parser = PieceParser(
            schema, source.columns, source.layout, options.has_labels, kept=options.keep
        )
        start = last.end if last is not None and number == last.source else Place()
        is_begun = start != Place()
        for piece in source.pieces(start, options.piece_bytes):
            parsed = parser.parse(piece.text, piece.start.line + 1, doubts=not is_begun)
            parsed = parsed.with_bad(piece.bad)
            is_begun = True
            spool.append(parsed, number, f"{source.path} {source.layout.unit}", piece.end)
            if parsed.num_bad > _HOPELESS * (parsed.num_bad + len(parsed.labels)):
                _refuse_bad(spool, options.max_bad_fraction)
            progress("parse", (number + piece.fraction) / len(sources))
    if not spool.num_records and not spool.num_bad:
        raise DataError(
            f"no records in {', '.join(str(s.path) for s in sources)}",
            "at least one",
            "check the files",
        )


def _refuse_bad(spool: Pieces, max_bad_fraction: float) -> None:
    total = spool.num_bad + spool.num_records
    if spool.num_bad > max_bad_fraction * total or not spool.num_records:
        shown = "; ".join(spool.bad_records(_SHOWN_BAD_RECORDS))
        raise DataError(
            f"{spool.num_bad} malformed of {total} records: {shown}",
            f"at most a fraction of {max_bad_fraction:g} malformed",
            "correct the input or the schema, or pass a higher --max-bad-fraction to leave such"
            " records out",
        )


def _encode(
    spool: Spool,
    work: Path,
    keep: Sequence[str],
    split: SplitRule,
    progress: Progress,
    encoders: Sequence[FeatureEncoder],
) -> DatasetWriter:
    """Write the splits; a line in ``encoded.jsonl`` after each piece says how far."""
    done_path = work / "dataset" / _DONE
    done = read_json_lines(done_path)
    totals = Totals(**done[-1]) if done else None
    writer = DatasetWriter(work / "dataset", spool.schema, totals, keep, has_places=True)
    first = sum(piece.num_records for piece in spool.pieces[: len(done)])
    for number in range(len(done), len(spool.pieces)):
        rows = encode_piece(spool.read(number), encoders, spool.pieces[number].source)
        append_assigned(writer, rows, split, first, spool.num_records)
        append_json_lines(done_path, asdict(writer.totals))
        first += len(rows.labels)
        progress("encode", (number + 1) / len(spool.pieces))
    return writer


def _codes_of(work: Path, table: str) -> NDArray[np.uint64] | None:
    path = work / "dataset" / "tables" / f"{table}.codes.u64"
    return np.fromfile(path, "<u8") if path.exists() else None


def _provenance(sources: Sequence[RawSource], options: PrepareOptions) -> dict[str, object]:
    return {
        "sources": [str(source.path) for source in sources],
        "split": asdict(options.split),
        "pibroch": __version__,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }
