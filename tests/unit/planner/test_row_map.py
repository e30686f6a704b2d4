import json

import numpy as np
import pytest

import pibroch as pb
from pibroch.errors import ConfigError
from pibroch.planner.assignment import Assignment
from pibroch.planner.kernels import row_map as fast
from pibroch.planner.kernels.row_map import naive
from row_plans import random_plan

TABLES = [pb.Table("a", 9, 4), pb.Table("ü/b", 1, 4), pb.Table("c", 400, 8)]


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_every_row_has_one_home_or_is_everywhere(num_shards, copies):
    for seed in range(5):
        plan = random_plan(TABLES, num_shards, seed, copies)
        plan.check(TABLES)
        for table in TABLES:
            at_home = [row for _, piece in plan.homes(table) for row in piece.rows.ids]
            everywhere = [piece.rows.ids.tolist() for _, piece in plan.copies(table)]
            assert all(rows == everywhere[0] for rows in everywhere) and len(everywhere) in (
                0,
                num_shards,
            )
            assert sum(piece.is_primary for _, piece in plan.copies(table)) == bool(everywhere)
            assert sorted(at_home + (everywhere or [[]])[0]) == list(range(table.num_rows))
            for _, piece in plan.pieces(table):
                assert (np.diff(piece.rows.ids) > 0).all() and len(piece.rows) == len(
                    piece.rows.ids
                ) > 0


def test_kernels_as_naive():
    rng = np.random.default_rng(0)
    partition = rng.integers(0, 7, 500).astype(np.uint16)
    place_of = rng.integers(0, 4, 7)
    index, counts, slow_index, slow_counts = (
        np.zeros(size, dtype) for size, dtype in 2 * ((500, np.uint32), (4, int))
    )
    assert fast.number_rows(partition, place_of, counts, index) == -1
    assert naive.number_rows(partition, place_of, slow_counts, slow_index) == -1
    assert np.array_equal(index, slow_index) and np.array_equal(counts, slow_counts)
    for place in range(4):
        out = np.empty(500, np.int64)
        slow = np.empty(500, np.int64)
        result = fast.rows_at(partition, place_of, place, out)
        assert result == naive.rows_at(partition, place_of, place, slow) == counts[place]
        assert np.array_equal(out[:result], slow[:result])
    index[321] += 1
    partition[400] = 9
    for kernels in (fast, naive):
        assert kernels.check_numbers(partition, place_of, np.zeros(4, int), index) == 321
        assert kernels.number_rows(partition, place_of, np.zeros(4, int), index.copy()) == 400


def test_a_file_gives_the_plan_back_and_is_mapped(tmp_path):
    plan = random_plan(TABLES, 3, 1, copies=True)
    plan.save(tmp_path / "plan.json")
    again = pb.Plan.load(tmp_path / "plan.json")
    assert again.placements == plan.placements
    for name in ("partition", "index", "home", "copies"):
        assert np.array_equal(getattr(again.row_map, name), getattr(plan.row_map, name))
    assert isinstance(again.row_map.partition.base, np.memmap)
    assert (tmp_path / "plan.json.rows").stat().st_size < 6 * 410 + 1000


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-3],
        lambda data: data[:100],
        lambda data: b"",
        lambda data: b"\xff" * 400,
        lambda data: data.replace(b'"U16"', b'"I16"'),
        lambda data: data.replace(b'"copies"', b'"copied"'),
        lambda data: data[:-2000] + b"\x09" + data[-1999:],
        lambda data: b"\x08" + bytes(7) + b"[1,2,3] " + data,
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    random_plan(TABLES, 3, 1, copies=True).save(tmp_path / "plan.json")
    path = tmp_path / "plan.json.rows"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError):
        pb.Plan.load(tmp_path / "plan.json")


def test_what_does_not_fit_is_refused(tmp_path):
    plan = random_plan(TABLES, 3, 1, copies=True)
    for tables in (TABLES[:2], [*TABLES[:2], pb.Table("c", 401, 8)]):
        with pytest.raises(ConfigError):
            plan.check(tables)
    plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    content["placements"]["a"]["shards"] = [0, 1]
    del content["sha256"]  # as in a plan that somebody wrote by hand
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="3 distinct"):
        pb.Plan.load(tmp_path / "plan.json").check(TABLES)
    (tmp_path / "plan.json.rows").unlink()
    with pytest.raises(ConfigError, match=r"no .*plan\.json\.rows"):
        pb.Plan.load(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="need one of the shards 0 to 1"):
        pb.Plan.by_rows(
            Assignment(
                {"a": np.zeros(3, np.uint16)}, np.array([2], np.uint16), np.zeros((1, 2), np.bool_)
            )
        )
    with pytest.raises(ConfigError, match="row 1 of table 'a' in partition 7"):
        pb.Plan.by_rows(
            Assignment(
                {"a": np.array([0, 7], np.uint16)},
                np.zeros(1, np.uint16),
                np.zeros((1, 2), np.bool_),
            )
        )


def test_every_flip_in_either_file_is_noticed(tmp_path):
    path = tmp_path / "plan.json"
    rng = np.random.default_rng(0)
    random_plan(TABLES, 3, 1, copies=True).save(path)
    for file in (path, path.with_name("plan.json.rows")):
        whole = file.read_bytes()
        for place in rng.integers(0, len(whole), 40):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << rng.integers(0, 8)
            if file == path and bytes(flipped).split() == whole.split():
                continue  # white space
            file.write_bytes(flipped)
            with pytest.raises(ConfigError):
                pb.Plan.load(path)
        file.write_bytes(whole)
    pb.Plan.load(path)
