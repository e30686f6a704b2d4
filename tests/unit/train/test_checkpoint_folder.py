"""Which checkpoints of a run are kept, and what incremental ones stand on; one process."""

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from pibroch.data import EncodedDataset
from pibroch.embedding.row_index import state_of
from pibroch.embedding.row_marks import SAVED
from pibroch.errors import CheckpointError
from pibroch.state import files as storage
from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.state.manifest import MANIFEST, Progress, read_manifest
from pibroch.train.session import build_session
from small_run import make_config


@pytest.fixture
def session(data):
    return build_session(make_config(data), EncodedDataset.open(data))


def touch(session, rows=2):
    """As an update of the first rows of each table would."""
    for view in session.embeddings.pieces():
        view.weights[:rows] += 1
        view.mark(slice(rows))


def save_steps(folder, session, steps):
    for step in steps:
        folder.save(session, Progress(step=step))
        touch(session, step)


def weights(session):
    return [view.weights.copy() for view in session.embeddings.pieces()]


def resumed(data, path, full_every=1, settings=()):
    session = build_session(make_config(data, "seed=9", *settings), EncodedDataset.open(data))
    CheckpointFolder(path, 9, full_every).resume(session)
    return session


def test_every_incremental_one_is_complete_in_itself(data, session, tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1, full_every=4)
    for step in (1, 2, 3):
        folder.save(session, Progress(step=step))
        saved = weights(session)
        assert folder.steps() == [step], "the full one is gone by the second step"
        loaded = resumed(data, tmp_path)
        assert all((a == b).all() for a, b in zip(saved, weights(loaded), strict=True))
        touch(session, step)
    assert read_manifest(folder.latest()).increments == 2


def test_full_ones_come_when_they_are_due(session, tmp_path):
    folder = CheckpointFolder(tmp_path, keep=9, full_every=3)
    save_steps(folder, session, range(1, 8))
    assert [read_manifest(folder.path(step)).increments for step in folder.steps()] == [
        0,
        1,
        2,
        0,
        1,
        2,
        0,
    ]
    sizes = [
        sum(path.stat().st_size for path in folder.path(step).glob("tables/*@step*"))
        for step in folder.steps()
    ]
    assert sizes[0] == sizes[3] == 0 < sizes[1] < sizes[2]


def test_what_a_checkpoint_beside_training_has_newer_is_in_the_next_one(data, session, tmp_path):
    """A run that goes on from it builds its next checkpoint on its own last one all the same."""
    own = tmp_path / "own"
    beside = tmp_path / "beside"
    CheckpointFolder(own, keep=9, full_every=3).save(session, Progress(step=1))
    shutil.copytree(own, beside)
    touch(session, 1)
    folder = CheckpointFolder(beside, keep=9, full_every=9)
    folder.resume(session)
    touch(session, 2)
    saved = weights(session)
    folder.save(session, Progress(step=2))
    shutil.rmtree(folder.path(1))
    again = build_session(make_config(data, "seed=9"), EncodedDataset.open(data))
    after = CheckpointFolder(own, keep=9, full_every=3, beside=beside)
    assert after.resume(again).step == 2 and after.last.folder == after.path(1)
    marked = [view.marks[SAVED].nonzero()[0].tolist() for view in again.embeddings.pieces()]
    assert marked == [[0, 1]] * len(marked), "what the other one has newer than ours"
    after.save(again, Progress(step=3))
    assert read_manifest(after.path(3)).increments == 1
    loaded = resumed(data, own)
    assert all((a == b).all() for a, b in zip(saved, weights(loaded), strict=True))


def test_after_a_restart_from_its_own_last_one_nothing_is_marked(data, session, tmp_path):
    save_steps(CheckpointFolder(tmp_path, keep=9, full_every=3), session, [1, 2])
    pieces = resumed(data, tmp_path, full_every=3).embeddings.pieces()
    assert not any(view.marks[SAVED].any() for view in pieces)


def test_without_the_last_one_the_next_is_full(session, tmp_path, caplog):
    folder = CheckpointFolder(tmp_path, keep=9, full_every=5)
    save_steps(folder, session, [1])
    shutil.rmtree(folder.path(1))
    with caplog.at_level(logging.WARNING):
        save_steps(folder, session, [2])
    assert "full" in caplog.text and read_manifest(folder.path(2)).increments == 0


def test_a_disk_without_links_gets_copies(data, session, tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError("no links here")

    monkeypatch.setattr(storage.os, "link", refuse)
    folder = CheckpointFolder(tmp_path, keep=9, full_every=2)
    save_steps(folder, session, [1, 2])
    one, two = (folder.path(step) / "tables" / "C1.safetensors" for step in (1, 2))
    assert one.read_bytes() == two.read_bytes() and not os.path.samefile(one, two)
    resumed(data, tmp_path)


def test_the_best_one_is_kept_also_in_a_relative_folder(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = CheckpointFolder(tmp_path.relative_to(tmp_path) / "checkpoints", keep=1)
    for step in (1, 2, 3):
        progress = Progress.model_validate(
            {"step": step, "monitor": {"best_step": 1, "best_value": 0.5}}
        )
        folder.save(session, progress)
    assert folder.steps() == [1, 3] and folder.best().name == "step-00000001"


def test_another_format_is_refused(session, tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(session, Progress(step=1))
    manifest = read_manifest(folder.latest())
    manifest.model_copy(update={"format_version": 1}).write(folder.latest())
    with pytest.raises(CheckpointError, match="format 1; need format 2"):
        read_manifest(folder.latest())
    (folder.latest() / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"no .*manifest\.json"):
        read_manifest(folder.latest())


def test_the_best_one_is_found_where_the_disk_takes_no_links(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (3, 5):
        folder.path(step).mkdir()

    def refuse(*_):
        raise PermissionError(1, "no rights to make links")

    folder.link_best(3)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "symlink_to", refuse)
        folder.link_best(5)
        assert folder.best() == folder.path(5)
        folder.link_best(3)
        assert folder.best() == folder.path(3)
    folder.link_best(5)
    assert folder.best() == folder.path(5) and (tmp_path / "best").is_symlink()
    folder.link_best(None)
    assert folder.best() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000005"]


def test_what_else_lies_among_checkpoints_is_left_alone(tmp_path):
    for name in ("step-00000007", "step-00000003", "step-old", "step-00000007.bak", "notes"):
        (tmp_path / name).mkdir()
    folder = CheckpointFolder(tmp_path, keep=1)
    assert folder.steps() == [3, 7]
    assert folder.latest() == tmp_path / "step-00000007"


def test_full_and_incremental_ones_have_the_state_of_row_indices(data, tmp_path):
    settings = ["embedding.rows=shuffled_rows:Shuffled"]
    session = build_session(make_config(data, *settings), EncodedDataset.open(data))
    folder = CheckpointFolder(tmp_path, keep=1, full_every=2)
    for step in (1, 2):  # a full one, and one with changed rows
        save_steps(folder, session, [step])
        result = state_of(resumed(data, tmp_path, settings=settings).embeddings.row_indices)
        np.testing.assert_equal(result, state_of(session.embeddings.row_indices))
