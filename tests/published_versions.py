"""Versions that a run published, compared with exports of checkpoints of their steps."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.serve.from_delta import open_exported
from pibroch.serve.row_files import MappedRows
from pibroch.state.delta_format import read_delta
from pibroch.state.export_format import ExportDtype, is_export, read_export
from pibroch.state.exported_ids import TableIds, read_ids
from small_run import files_below


def versions(folder: Path) -> list[Path]:
    """The numbers in a folder of exports, rising."""
    return sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=number_of)


def number_of(path: Path) -> int:
    return int(path.name)


def used_rows(export: Path) -> np.ndarray:
    """Rows that an id has, of all tables."""
    tables = read_export(export).tables
    ids = read_ids(export, tables)
    rows = [
        table.first_row
        + (np.sort(ids[table.name].rows) if table.has_ids else np.arange(table.num_rows))
        for table in tables
    ]
    return np.concatenate(rows)


def rows_by_id(layers: Sequence[TableIds]) -> dict[int, int]:
    """The row of each id that has one, by plain Python; later layers count."""
    rows: dict[int, int] = {}
    for layer in layers:
        rows |= zip(layer.ids.tolist(), layer.rows.tolist(), strict=True)
    return {id_: row for id_, row in rows.items() if row >= 0}


def check_same(folder: Path, checkpoints: Path, dtype: ExportDtype = "float32") -> list[int]:
    """Each version has what an export of a checkpoint of its step has; the steps."""
    steps = []
    for path in versions(folder):
        opened = open_exported(path)
        whole = folder.parent / f"whole-{dtype}-{opened.step}"
        if not whole.exists():
            export_checkpoint(checkpoints / f"step-{opened.step:08d}", whole, ExportOptions(dtype))
        expected = open_exported(whole)
        assert isinstance(opened.lookup, MappedRows) and isinstance(expected.lookup, MappedRows)
        rows = used_rows(whole)
        ids = read_ids(whole, expected.lookup.manifest.tables)
        for name, layers in opened.lookup._ids.items():
            assert rows_by_id(layers) == rows_by_id([ids[name]]), name
        assert np.array_equal(opened.lookup.stored(rows), expected.lookup.stored(rows))
        state, right = (each.dense.state_dict() for each in (opened, expected))
        assert all(np.array_equal(state[name], right[name]) for name in right)
        if is_export(path):
            assert opened.version == expected.version
            files = files_below(whole)
            del files["origin.json"]
            assert files_below(path) == files
        else:
            manifest, _ = read_delta(path)
            assert manifest.step == opened.step and (manifest.time or 0) > 1e9
        steps.append(opened.step)
    return steps
