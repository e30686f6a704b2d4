"""A file of all items: the columns of their features, a row each."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from pibroch.errors import DataError


def read_items(path: Path) -> dict[str, list[object]]:
    """The columns of a Parquet file, or of a CSV file with a header, all of whose values are text.

    Raises:
        DataError: where it cannot be read, or has no rows.
    """
    try:
        is_text = path.suffix.lower() in (".csv", ".txt")
        frame = pl.read_csv(path, infer_schema=False) if is_text else pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DataError(
            f"items in {path} that cannot be read: {error}",
            "a Parquet file, or a CSV file with a header",
            "write one row for each item, with the columns of the item's features",
        ) from error
    if not len(frame):
        raise DataError(f"no rows in {path}", "one for each item", "write them")
    return {name: frame[name].to_list() for name in frame.columns}


def check_columns(columns: dict[str, list[object]], needed: set[str], source: str) -> None:
    """Raise DataError unless items have all columns of their features."""
    if missing := sorted(needed - columns.keys()):
        raise DataError(
            f"items in {source} without the column `{missing[0]}`",
            f"the columns {', '.join(sorted(needed))}",
            "add it",
        )
