"""Checkpoints of some ranks and placement, read by others under another.

Damaged, incremental, interrupted ones.
"""

import os

import checkpoint_cases as cases
import numpy as np
import pytest
from world import World

from pibroch.embedding.row_set import ids_of
from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.state.manifest import read_manifest
from row_plans import random_plan
from small_run import files_below

PLACEMENTS = [
    *((ranks, kind) for ranks in (1, 2, 3) for kind in ("table_wise", "column_wise", "replicated")),
    (2, cases.MIXED),
    (4, "table_wise"),
]


def whole(results):
    """Weights and state of all tables from all ranks' pieces, and the dense weights.

    Replicas must agree.
    """
    tables = {}
    for pieces, _ in results:
        for piece, fields in pieces:
            rows = ids_of(piece.rows)
            for name, numbers in fields.items():
                per_column = (
                    name == "weight"
                    or numbers.shape[1] == len(piece.columns) > 1
                    or piece.table.dim == 1
                )
                width = piece.table.dim if per_column else numbers.shape[1]
                key = (piece.table.name, name)
                table = tables.setdefault(
                    key, np.full((piece.table.num_rows, width), np.nan, np.float32)
                )
                columns = (
                    slice(piece.columns.start, piece.columns.stop) if per_column else slice(None)
                )
                seen = table[rows][:, columns]
                assert np.isnan(seen).all() or np.array_equal(seen, numbers), (
                    f"replicas of {key} differ"
                )
                table[rows, columns] = numbers
    return {"/".join(key): table for key, table in tables.items()} | results[0][1]


def compare(got, expected, same_bits, message=""):
    assert got.keys() == expected.keys()
    for name, right in expected.items():
        if same_bits:
            np.testing.assert_array_equal(got[name], right, f"{name} {message}")
        else:
            np.testing.assert_allclose(got[name], right, 2e-4, 2e-6, err_msg=f"{name} {message}")


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
def test_saved_by_four_row_wise_and_loaded_by_others(worlds, data, tmp_path, optimizer):
    options = {"optimizer": optimizer}
    results = worlds(4).run(cases.begin_and_save, data, tmp_path, options)
    saved, expected = (whole([result[i] for result in results]) for i in (0, 1))
    assert any((saved[name] != expected[name]).any() for name in saved)
    for ranks, placement in PLACEMENTS:
        results = worlds(ranks).run(
            cases.move_and_go_on, data, tmp_path, {**options, "placement": placement}
        )
        loaded, went_on = (whole([result[i] for result in results]) for i in (0, 1))
        compare(loaded, saved, True, f"loaded by {ranks}, {placement}")
        compare(went_on, expected, ranks == 4, f"after going on with {ranks}, {placement}")


def test_saved_under_plans_of_rows_and_loaded_row_wise_and_back(worlds, data, tmp_path):
    """The first three are saved by four ranks, the last as an increment.

    What others load and save is loaded again.
    """
    tables = cases.tables_of(data)
    plan = random_plan(tables, 4, 1, copies=True)
    options = {"full_every": 3, "optimizer": "averaged", "placement": plan}
    numbers = whole(worlds(4).run(cases.save_every_step, data, tmp_path, 2, options))
    assert read_manifest(CheckpointFolder(tmp_path, 2).latest()).increments == 1
    right = whole(
        worlds(4).run(
            cases.save_every_step,
            data,
            tmp_path / "row_wise",
            2,
            options | {"placement": "row_wise"},
        )
    )
    compare(numbers, right, True, "under the plan")
    for ranks in (1, 2, 3):
        moved = worlds(ranks).run(
            cases.load_and_save, data, tmp_path, tmp_path / str(ranks), {"optimizer": "averaged"}
        )
        compare(whole(moved), numbers, True, f"loaded row-wise by {ranks}")
        again = {"optimizer": "averaged", "placement": random_plan(tables, 4, ranks, copies=True)}
        back = worlds(4).run(cases.move_and_go_on, data, tmp_path / str(ranks), again)
        compare(
            whole([loaded for loaded, _ in back]),
            numbers,
            True,
            f"of {ranks}, loaded under another plan",
        )


def test_incremental_checkpoints_and_a_resumed_run_s_bytes(worlds, data, tmp_path):
    options = {"full_every": 3, "placement": cases.MIXED, "keep": 2}
    numbers = whole(
        worlds(2).run(cases.save_every_step, data, tmp_path / "undisturbed", 5, options)
    )
    for last in (1, 3, 5):  # stops after an incremental and after a full one
        worlds(2).run(cases.save_every_step, data, tmp_path / "resumed", last, options)
    assert files_below(tmp_path / "resumed") == files_below(tmp_path / "undisturbed")

    folder = CheckpointFolder(tmp_path / "undisturbed", 2)
    assert folder.steps() == [4, 5]
    manifests = [read_manifest(folder.path(step)) for step in (4, 5)]
    assert [manifest.increments for manifest in manifests] == [0, 1]
    shared = folder.path(4) / "tables" / "C4@0-of-2.safetensors"
    assert os.path.samefile(shared, folder.path(5) / "tables" / shared.name)
    deltas = [file for file in manifests[1].files if "@step-" in file]
    assert deltas and all(manifests[1].files[file].size_bytes > 0 for file in deltas)

    for ranks, placement in ((1, "row_wise"), (3, "column_wise")):
        moved = worlds(ranks).run(
            cases.move_and_go_on, data, folder.folder, {"placement": placement}
        )
        compare(
            whole([loaded for loaded, _ in moved]), numbers, True, f"loaded by {ranks}, {placement}"
        )


def test_a_byte_flipped_in_any_file_is_found_and_named(worlds, data, tmp_path):
    worlds(2).run(
        cases.save_every_step, data, tmp_path, 2, {"full_every": 2, "placement": cases.MIXED}
    )
    checkpoint = CheckpointFolder(tmp_path, 2).latest()
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    kinds = {
        "manifest",
        "dense.",
        "dense_optimizer",
        "random",
        "C1@0-of-2.",
        "C2.",
        "C4@step-",
    }
    assert all(any(path.name.startswith(kind) for path in files) for kind in kinds)
    for messages in worlds(2).run(
        cases.try_to_resume_with_each_file_damaged, data, tmp_path, files
    ):
        for path, message in zip(files, messages, strict=True):
            assert message is not None and path.name in message, f"{path.name}: {message}"
            lies_in_both = (
                tmp_path / "step-00000001" / path.relative_to(checkpoint)
            ).exists() and "tables" in path.parts
            assert (
                "no undamaged checkpoint" if lies_in_both else "the run goes on from step 1"
            ) in message, path.name
    assert worlds(2).run(cases.try_to_resume, data, tmp_path) == [None, None]


@pytest.mark.parametrize(
    ("how", "error"), [("nan", "TrainingError"), ("full disk", "StorageError")]
)
@pytest.mark.parametrize("bad_rank", [0, 2])
def test_a_failure_on_one_rank_is_an_error_on_all(worlds, data, tmp_path, how, error, bad_rank):
    results = worlds(3).run(cases.fail_to_save, data, tmp_path, how, bad_rank)
    for rank, (message, left) in enumerate(results):
        assert message is not None and message[0] == error
        assert (f"rank {bad_rank}" in message[1]) == (rank != bad_rank)
        assert left == ["step-00000001"]
    assert worlds(2).run(cases.try_to_resume, data, tmp_path) == [None, None]
    assert CheckpointFolder(tmp_path, 2).steps() == [1, 2]


@pytest.mark.parametrize(("rank", "where"), [(1, 3), (0, 30)])
def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(
    worlds, data, tmp_path, rank, where
):
    """Rank 1 dies within its tables, rank 0 after the manifest and before the rename."""
    world = World(2)
    try:
        with pytest.raises((AssertionError, EOFError)):
            world.run(cases.die_while_saving, data, tmp_path, rank, where)
        world._processes[rank].join(20)
        assert world._processes[rank].exitcode == -9
    finally:
        world.close()
    assert CheckpointFolder(tmp_path, 2).steps() == [1]
    assert worlds(2).run(cases.try_to_resume, data, tmp_path) == [None, None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_what_fails_on_one_rank_fails_on_all(worlds, bad_rank):
    for kind, own, others in (
        ("pibroch", "DataError", "DataError"),
        ("bug", "ZeroDivisionError", "RankFailedError"),
    ):
        for rank, (message, values, first) in enumerate(
            worlds(3).run(cases.work_together, bad_rank, kind)
        ):
            assert message[0] == (own if rank == bad_rank else others)
            assert rank == bad_rank or f"rank {bad_rank}" in message[1]
            assert (values, first) == ([0, 1, 2], 7)


def test_a_disk_that_is_not_shared_is_an_error(worlds, data, tmp_path):
    for rank, (kind, message) in enumerate(
        worlds(2).run(cases.begin_where_others_do_not_look, data, tmp_path)
    ):
        assert (
            kind == "StorageError"
            and "shared file system" in message
            and ("on rank 1" in message) == (rank == 0)
        )
    assert not list((tmp_path / "run").iterdir())
