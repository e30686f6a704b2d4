"""The log of ids that lost their rows: each line once, whatever was killed."""

import shutil

import numpy as np
import polars as pl
import pytest

from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.embedding import RowChanges
from pibroch.errors import ConfigError, InputError
from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.train import lost_ids
from pibroch.train.lost_ids import LostIds
from small_run import files_below, make_config, train_here

ROWS = "embedding.rows={name='hashed', capacity=200, expire_after=16}"


def changes_of(step):
    """Of two tables, as a step may bring them."""
    rng = np.random.default_rng(step)
    nothing = np.empty(0, np.int64)

    def ids():
        return np.sort(rng.integers(-(1 << 63), 1 << 63, rng.integers(0, 8) * (step % 3 > 0)))

    return {
        name: RowChanges(nothing, nothing, ids(), nothing, ids(), nothing)
        for name in ("user", "item")
    }


def lines_of(steps):
    return [
        (step, table, id_, reason)
        for step in steps
        for table, changes in changes_of(step).items()
        for reason, ids in (("evicted", changes.evicted_ids), ("expired", changes.expired_ids))
        for id_ in ids.tolist()
    ]


def test_files_are_those_of_a_run_that_nobody_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(lost_ids, "LINES_PER_FILE", 40)
    whole = LostIds(tmp_path / "whole", 0)
    for step in range(1, 101):
        whole.note(step, changes_of(step))
    whole.write()
    right = files_below(tmp_path / "whole")
    assert len(right) > 10
    assert pl.read_parquet(tmp_path / "whole").rows() == lines_of(range(1, 101))
    for seed in range(20):
        rng = np.random.default_rng(seed)
        folder = tmp_path / str(seed)
        step = 0
        safe = [0]
        while step < 100:
            log = LostIds(folder, step)
            for step in range(step + 1, min(101, step + int(rng.integers(2, 40)))):  # noqa: B020
                log.note(step, changes_of(step))
                if rng.random() < 0.2 or step == 100:  # something is made to go on from
                    log.write()
                    safe.append(step)
            if step < 100:  # killed; the newest may be lost, too
                step = safe[-1 - int(rng.random() < 0.3 and len(safe) > 1)]
                safe = [each for each in safe if each <= step]
        assert files_below(folder) == right


def test_a_log_whose_oldest_files_were_taken_away_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(lost_ids, "LINES_PER_FILE", 10)
    log = LostIds(tmp_path / "log", 0)
    for step in range(1, 21):
        log.note(step, changes_of(step))
    log.write()
    right = files_below(tmp_path / "log")
    first, *others = sorted(right)
    (tmp_path / "log" / first).unlink()
    (tmp_path / "log" / others[-1]).write_bytes(b"cut")
    with pytest.raises(InputError, match=r"parquet, damaged"):
        LostIds(tmp_path / "log", 20)
    (tmp_path / "log" / others[-1]).write_bytes(right[others[-1]])
    log = LostIds(tmp_path / "log", 15)
    assert pl.read_parquet(tmp_path / "log")["step"].max() <= 15
    for step in range(16, 21):
        log.note(step, changes_of(step))
    log.write()
    assert files_below(tmp_path / "log") == {name: right[name] for name in others}


@pytest.fixture(scope="module")
def raw_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "raw"
    synthesize(SyntheticOptions(3000, max_table_rows=2000, raw=True), folder)
    return folder


def test_a_run_writes_it_and_goes_on_with_it(raw_data, tmp_path):
    config = make_config(raw_data, ROWS, "model.batch_norm=false", "train.log_lost_ids=true")
    run, _ = train_here(config, tmp_path / "run")
    right = files_below(run.lost_ids_path)
    lines = pl.read_parquet(run.lost_ids_path)
    assert dict(lines.schema) == lost_ids.SCHEMA and lines["step"].is_sorted()
    for record in run.metrics():
        for table, figures in record.get("raw_ids", {}).items():
            of_step = lines.filter(step=record["step"], table=table)["reason"].to_list()
            assert of_step.count("evicted") == figures["evictions"]
            assert of_step.count("expired") == figures["expiries"]
    assert {"evicted", "expired"} == set(lines["reason"])
    shutil.rmtree(CheckpointFolder(run.checkpoints_path, 2).latest())
    (run.path / "summary.json").unlink()
    train_here(config, run.path)
    assert files_below(run.lost_ids_path) == right


def test_a_run_without_raw_ids_has_none(data, tmp_path):
    with pytest.raises(ConfigError, match="log_lost_ids without a table of raw ids"):
        train_here(make_config(data, "train.log_lost_ids=true"), tmp_path / "run")
