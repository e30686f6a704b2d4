"""What ``pibroch profile`` reads: a dataset's folder, a trace, or a profile to extrapolate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pibroch.data.dataset import EncodedDataset
from pibroch.errors import ConfigError, DataError
from pibroch.planner.count import CountOptions, count_dataset
from pibroch.planner.extrapolate import extrapolate
from pibroch.planner.profile import AccessProfile, Progress
from pibroch.planner.trace import count_trace


def make_profile(
    source: Path,
    options: CountOptions,
    rows: Mapping[str, int],
    to_samples: int | None,
    progress: Progress,
) -> AccessProfile:
    """The profile of a source, extrapolated if that is asked for.

    Raises:
        DataError: when the source is not there.
        ConfigError: for rows of a dataset's tables, which has its own, without an extrapolation.
    """
    if source.is_dir():
        if rows and to_samples is None:
            raise ConfigError(
                "--rows for a dataset", "no --rows: a dataset knows its tables", "leave it out"
            )
        made = count_dataset(EncodedDataset.open(source), options, progress=progress)
    elif not source.exists():
        raise DataError(
            f"{source}, which is not there", "a dataset, a trace or a profile", "check the path"
        )
    elif is_profile(source):
        made = AccessProfile.load(source)
    else:
        made = count_trace(
            source,
            rows.get("") if to_samples is None else None,
            options.batch_size,
            progress=progress,
        )
    if to_samples is None:
        return made
    only = next(iter(made.tables))
    wanted = {name or only: number for name, number in rows.items()}
    if "" in rows and len(made.tables) > 1:
        raise ConfigError(
            f"--rows {rows['']} for {len(made.tables)} tables", "TABLE=N", "name the table"
        )
    progress("extrapolating", 0.0)
    return extrapolate(made, to_samples, wanted, options.seed)


def is_profile(path: Path) -> bool:
    """Whether a file begins as safetensors files do: 8 bytes of a length, then JSON."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def name_rows(texts: Sequence[str]) -> dict[str, int]:
    """``TABLE=N`` or ``N`` (for the only table, under ``""``) to rows by table."""
    rows_by_table = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not number.isdigit() or not int(number):
            raise ConfigError(
                f"--rows {text}",
                "N or TABLE=N with a whole number",
                "for example --rows C3=10131227",
            )
        rows_by_table[name] = int(number)
    return rows_by_table
