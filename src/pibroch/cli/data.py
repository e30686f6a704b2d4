"""``pibroch data``: raw click logs, or generated ones, to encoded datasets."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from pibroch.cli.progress import stages
from pibroch.data import health
from pibroch.data.dataset import EncodedDataset
from pibroch.data.npy import NpySource
from pibroch.data.parquet import ParquetSource
from pibroch.data.prepare import PrepareOptions, PrepareReport, prepare
from pibroch.data.presets import avazu_schema, criteo_npy_schema, criteo_schema
from pibroch.data.schema import Schema
from pibroch.data.sources import RawSource, TextSource
from pibroch.data.sparse_text import SparseTextSource
from pibroch.data.splits import SplitRule
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.errors import ConfigError
from pibroch.overlap import refuse_overlap

app = typer.Typer(
    help="Turn raw click logs into encoded datasets, or generate one of known best AUC.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
log = logging.getLogger(__name__)


class RawFormat(StrEnum):
    """Formats of raw data."""

    CRITEO = "criteo"
    AVAZU = "avazu"
    CSV = "csv"
    PARQUET = "parquet"
    LIBSVM = "libsvm"
    LIBFFM = "libffm"
    CRITEO_NPY = "criteo-npy"


@app.command("prepare")
def prepare_command(
    format_: Annotated[
        RawFormat,
        typer.Argument(
            metavar="FORMAT", help=f"{', '.join(list(RawFormat)[:-1])} or {list(RawFormat)[-1]}."
        ),
    ],
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="SRC...", help="Files in time order: plain, gzip or zstd."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the dataset.")],
    schema: Annotated[
        Path | None,
        typer.Option(
            help="TOML schema; in place of the inferred one of criteo, criteo-npy and avazu."
        ),
    ] = None,
    min_count: Annotated[
        int | None,
        typer.Option(min=1, help="Values seen less often in the training split are unknown."),
    ] = None,
    hash_: Annotated[
        list[str] | None,
        typer.Option("--hash", metavar="NAME=BUCKETS", help="Hash this feature; may be repeated."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Keep ids as keys: no vocabularies, one pass.")
    ] = False,
    bins: Annotated[
        bool, typer.Option(help="criteo: also use the 13 integers as binned categories.")
    ] = True,
    vocabularies: Annotated[
        Path | None,
        typer.Option(
            metavar="FROM",
            help="Encode with those, and the schema, of a dataset, checkpoint, run or export.",
        ),
    ] = None,
    unlabelled: Annotated[
        bool,
        typer.Option(help="With --vocabularies: the data have no labels and are to be scored."),
    ] = False,
    validation: Annotated[
        list[Path] | None,
        typer.Option(metavar="SRC", help="A file to validate with; SRC... train. Repeatable."),
    ] = None,
    test: Annotated[
        list[Path] | None,
        typer.Option(metavar="SRC", help="A file to test with, likewise."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="time:A/B/C, hash:A/B/C, none, or a split for all; time:0.7/0.15/0.15 by default."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the hash split.")] = 0,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="Pass this column through to the files that `pibroch predict` writes. Repeatable.",
        ),
    ] = None,
    max_bad_fraction: Annotated[
        float, typer.Option(min=0, max=1, help="Malformed lines that are tolerated.")
    ] = 1e-4,
    overwrite: Annotated[
        bool, typer.Option(help="Replace a dataset that is already at --out.")
    ] = False,
    piece_mb: Annotated[
        int, typer.Option(min=1, max=512, help="MB of text in memory at once.")
    ] = 32,
) -> None:
    """Encode raw click logs, whatever their size, in bounded memory.

    A killed run goes on where it was when the same command is given again.

    **Examples**

        pibroch data prepare criteo train.txt.gz --out data/criteo

        pibroch data prepare criteo day_*.gz --out data/tb --min-count 10 --hash C3=4000000

        pibroch data prepare criteo train.txt.gz --out data/raw --raw

        pibroch data prepare csv clicks.csv --schema clicks.toml --out data/mine

        pibroch data prepare csv old.csv --validation new.csv --test newest.csv --schema
        clicks.toml --out data/mine

        pibroch data prepare libffm train.ffm --schema ffm.toml --out data/ffm

        pibroch data prepare criteo-npy day_*_dense.npy --out data/tb

        pibroch data prepare criteo day_1.gz --vocabularies runs/first --out data/tomorrow
    """
    started = time.monotonic()
    parts = (sources, validation or [], test or [])
    sources = [path for part in parts for path in part]
    for folder in (out, out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.old")):
        refuse_overlap(folder, [*sources, schema, vocabularies])
    if raw and min_count is not None:
        raise ConfigError(
            "--raw with --min-count",
            "vocabularies, which it cuts, or raw ids",
            "leave one of them out; tables of raw ids cut by `admit_after` in the recipe",
        )
    vocabulary = None
    if vocabularies is not None:
        if schema is not None or min_count is not None or hash_ or raw or not bins:
            raise ConfigError(
                "--vocabularies with --schema, --min-count, --hash, --raw or --no-bins",
                "the schema that the vocabularies are of",
                "leave these options out",
            )
        from pibroch.serve.vocabularies import find_vocabularies  # with torch, for checkpoints

        vocabulary = find_vocabularies(vocabularies)
    encoding, opened = _sources(
        format_,
        sources,
        schema,
        bins,
        None if vocabulary is None else vocabulary.schema,
        not unlabelled,
        tuple(keep or ()),
    )
    if vocabulary is None:
        encoding = encoding.with_changes(min_count, _buckets(hash_ or []), raw)
    if validation or test:
        if split is not None:
            raise ConfigError(
                "--split with --validation or --test",
                "one of them, to say which samples train",
                "leave --split out",
            )
        train_files, validation_files, test_files = map(len, parts)
        rule = SplitRule("files", files=(train_files, validation_files, test_files))
    else:
        split = split or ("time:0.7/0.15/0.15" if vocabulary is None else "test")
        rule = SplitRule.parse(split, seed)
    options = PrepareOptions(
        rule,
        max_bad_fraction,
        overwrite,
        piece_mb << 20,
        vocabularies=vocabulary,
        has_labels=not unlabelled,
        keep=tuple(keep or ()),
    )
    with stages() as progress:
        report = prepare(opened, encoding, out, options, progress)
    _show_report(report, out, time.monotonic() - started)


@app.command("synthesize")
def synthesize_command(
    samples: Annotated[
        int, typer.Option("--samples", "--rows", min=1, help="Samples over all splits.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the dataset.")],
    seed: Annotated[int, typer.Option(min=0, help="The same options give the same data.")] = 0,
    multi_hot: Annotated[
        bool, typer.Option(help="Every third category holds zero to several ids.")
    ] = False,
    history: Annotated[
        int, typer.Option(min=0, help="A sequence of up to so many items of C2's table.")
    ] = 0,
    groups: Annotated[
        int,
        typer.Option(
            min=0,
            help="Groups of features that interact with each other alone, as towers find them.",
        ),
    ] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Ids are keys, as prepare --raw leaves them.")
    ] = False,
    drift: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="With --raw: this share of hot ids is replaced now and then."
        ),
    ] = 0.0,
    every: Annotated[
        int, typer.Option(min=1, help="Samples between two times of --drift.")
    ] = 1_000_000,
    max_table_rows: Annotated[
        int, typer.Option(min=1, help="Criteo's tables, none larger than this.")
    ] = 10_000,
    table_rows: Annotated[
        int | None, typer.Option(min=1, help="Instead, all 26 tables of this size.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="time:A/B/C, hash:A/B/C or none.")
    ] = "time:0.7/0.15/0.15",
    overwrite: Annotated[
        bool, typer.Option(help="Replace a dataset that is already at --out.")
    ] = False,
) -> None:
    """Generate Criteo-shaped data: as skewed as the real log, labels from a planted model.

    Because the true click probabilities are known, so is the best AUC that any model can reach; it
    is printed and written to truth.json.

    **Examples**

        pibroch data synthesize --samples 1000000 --out data/synthetic

        pibroch data synthesize --samples 1000000 --out data/bags --multi-hot --table-rows 100000
    """
    rule = SplitRule.parse(split, seed)
    options = SyntheticOptions(
        samples,
        seed,
        max_table_rows,
        table_rows,
        multi_hot,
        rule,
        groups,
        raw,
        history,
        drift,
        every,
    )
    with stages() as progress:
        truth = synthesize(options, out, overwrite=overwrite, progress=progress)
    table = Table(
        "split", "click rate", "best AUC", "best logloss", title=f"{samples:,} samples in {out}"
    )
    for name, best in truth.items():
        table.add_row(
            name, f"{best['click_rate']:.4f}", f"{best['auc']:.4f}", f"{best['logloss']:.4f}"
        )
    Console().print(table)


@app.command("describe")
def describe_command(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="An encoded dataset.")],
    verify: Annotated[
        bool, typer.Option(help="Also compare all contents with their checksums.")
    ] = False,
    as_toml: Annotated[
        bool, typer.Option("--schema", help="Print the schema as TOML, to edit and reuse.")
    ] = False,
) -> None:
    """Show what an encoded dataset holds.

    Samples, click rates, tables, how skewed their accesses are, what ids are lost.
    """
    dataset = EncodedDataset.open(path)
    if verify:
        dataset.verify()
    if as_toml:
        typer.echo(dataset.schema.to_toml(), nl=False)
        return
    splits = ", ".join(f"{name} {count:,}" for name, count in dataset.samples.items())
    table = Table(
        "table", "rows", "top 1 % of rows take", "unknown", "missing", title=f"{path}: {splits}"
    )
    for feature, share in health.shares(dataset).items():
        rows = dataset.num_rows[feature]
        if rows is None:
            table.add_row(feature, "raw ids", "", "", f"{share.missing:.1%}")
            continue
        counts = np.sort(dataset.accesses(feature).counts)
        top = int(counts[-max(1, round(rows / 100)) :].sum())
        of_ids = (top / max(1, share.num_ids), share.unknown, share.missing)
        table.add_row(feature, f"{rows:,}", *(f"{value:.1%}" for value in of_ids))
    console = Console()
    console.print(table)
    for label, rates in health.click_rates(dataset).items():
        which = f" of {label}" if len(dataset.schema.label_columns) > 1 else ""
        shown = (f"{name} {rate:.4f}" for name, rate in rates.items() if rate is not None)
        console.print(f"click rate{which}: " + ", ".join(shown))
    for warning in health.warnings(dataset):
        console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(dataset.schema.dense)} dense features, {_tables(dataset.num_rows)}")
    if dataset.best_possible_auc:
        best = ", ".join(f"{name} {auc:.4f}" for name, auc in dataset.best_possible_auc.items())
        console.print(f"best possible AUC: {best}")


def _sources(
    format_: RawFormat,
    paths: list[Path],
    schema_path: Path | None,
    bins: bool,
    prepared: Schema | None,
    has_labels: bool,
    keep: tuple[str, ...],
) -> tuple[Schema, list[RawSource]]:
    """The schema, known, given or inferred, and the opened files."""
    schema = prepared if schema_path is None else Schema.load(schema_path)
    if schema is None and format_ is RawFormat.CRITEO:
        schema = criteo_schema(bins=bins)
    if schema is None and format_ is RawFormat.CRITEO_NPY:
        schema = criteo_npy_schema()
    if schema is None and format_ is RawFormat.AVAZU:
        header, *records = TextSource(paths[0], ",", True).first_records(2)
        schema = avazu_schema(header, records[0] if records else [])
    if schema is None:
        raise ConfigError(
            f"format {format_} without a schema",
            "a TOML file that names the label and the features",
            "pass --schema FILE, see docs/data.md",
        )
    if format_ is RawFormat.PARQUET:
        return schema, [ParquetSource(path, schema, has_labels, kept=keep) for path in paths]
    if format_ is RawFormat.CRITEO_NPY:
        return schema, [NpySource(path, has_labels) for path in paths]
    if format_ in (RawFormat.LIBSVM, RawFormat.LIBFFM):
        has_fields = format_ is RawFormat.LIBFFM
        return schema, [SparseTextSource(path, schema, has_fields, has_labels) for path in paths]
    return schema, [_text_source(path, schema, has_labels) for path in paths]


def _text_source(path: Path, schema: Schema, has_labels: bool) -> TextSource:
    """A file of text; one without header and labels may lack the labels' columns, or have them."""
    source = TextSource(path, schema.separator, schema.quotes, schema.columns)
    if has_labels or schema.columns is None:
        return source
    without = tuple(column for column in schema.columns if column not in schema.training_columns)
    if len(source.first_records(1)[0]) != len(without):
        return source
    return TextSource(path, schema.separator, schema.quotes, without)


def _buckets(texts: list[str]) -> Mapping[str, int]:
    buckets = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not number.isdigit() or not int(number):
            raise ConfigError(
                f"--hash {text}",
                "NAME=BUCKETS with a whole number",
                "for example --hash C3=1000000",
            )
        buckets[name] = int(number)
    return buckets


def _tables(num_rows: Mapping[str, int | None]) -> str:
    """Tables and their rows in words."""
    sizes = [rows for rows in num_rows.values() if rows is not None]
    words = [f"{len(sizes)} tables with {sum(sizes):,} rows"] if sizes else []
    if num_raw := len(num_rows) - len(sizes):
        words.append(f"{num_raw} features with raw ids")
    return ", ".join(words)


def _show_report(report: PrepareReport, out: Path, seconds: float) -> None:
    console = Console(highlight=False, soft_wrap=True)
    total = sum(report.samples.values())
    splits = ", ".join(f"{name} {count:,}" for name, count in report.samples.items())
    console.print(f"{total:,} samples in {out} ({splits}) after {seconds:.1f} s")
    console.print(_tables(report.num_rows))
    if report.unknown:
        by_count = sorted(report.unknown.items(), key=lambda item: -item[1][0])
        total_unknown, num_ids = (
            sum(pair[place] for pair in report.unknown.values()) for place in (0, 1)
        )
        most = ", ".join(
            f"{name} {count:,} of {total:,}" for name, (count, total) in by_count[:5] if count
        )
        console.print(
            f"{total_unknown:,} of {num_ids:,} ids are unknown to the"
            f" vocabularies{': ' + most if most else ''}"
        )
    if report.num_bad:
        console.print(f"{report.num_bad:,} malformed records left out, the first of them:")
        for line in report.bad:
            console.print(f"  {line}", markup=False)
