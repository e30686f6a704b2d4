from types import SimpleNamespace

import numpy as np
import pytest

import pibroch as pb
from pibroch.embedding import MemoryShard, RowSpace
from pibroch.errors import ConfigError


@pytest.mark.parametrize("fields", [{"num_rows": 0}, {"dim": 0}, {"dim": -3}, {"dim": 2.5}, {"pooling": "max"}])
def test_bad_tables_are_refused_by_name(fields):
    with pytest.raises(ConfigError, match="'a'"):
        pb.Table(**({"name": "a", "num_rows": 3, "dim": 2} | fields))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "no tables"),
        ([pb.Table("a", 3, 2), pb.Table("a", 3, 2, features=("b",))], "table 'a' named twice"),
        ([pb.Table("a", 3, 2), pb.Table("b", 3, 2, features=("a",))], "feature 'a' named twice"),
        ([pb.Table("a", 3, 2), pb.Table("b", 3, 4)], r"dim \[2, 4\]"),
    ],
)
def test_tables_that_do_not_go_together(tables, message):
    with pytest.raises(ConfigError, match=message):
        RowSpace(tables)


def test_row_space_lays_tables_end_to_end():
    space = RowSpace([pb.Table("a", 3, 2), pb.Table("b", 5, 2, features=("x", "y")), pb.Table("c", 1, 2)])
    assert space.num_rows == 9
    assert space.first_row == {"a": 0, "b": 3, "c": 8}
    assert space.features == ("a", "x", "y", "c")
    assert space.first_row_of_feature.tolist() == [0, 3, 3, 8]
    assert space.rows_of("b") == slice(3, 8)


def test_table_from_torchrec_config():
    config = SimpleNamespace(
        name="t", num_embeddings=7, embedding_dim=3, feature_names=["f", "g"], pooling=SimpleNamespace(value="MEAN")
    )
    assert pb.Table.from_config(config) == pb.Table("t", 7, 3, ("f", "g"), "mean")


def test_weights_depend_on_seed_and_name_alone():
    def weights(tables, seed=1):
        return MemoryShard.whole(tables, pb.SGD(lr=1.0), seed).weights("a").copy()

    alone = weights([pb.Table("a", 50, 4)])
    assert np.array_equal(alone, weights([pb.Table("b", 7, 4), pb.Table("a", 50, 4)]))
    assert not np.array_equal(alone, weights([pb.Table("a", 50, 4)], seed=2))
    assert np.abs(alone).max() <= 50**-0.5


def test_shard_views_are_the_records():
    shard = MemoryShard.whole([pb.Table("a", 3, 2), pb.Table("b", 4, 2)], pb.Adam(lr=1.0), 0)
    assert shard.records.shape == (7, 6)
    shard.state("b")["exp_avg_sq"][:] = 5
    assert (shard.records[3:, 4:] == 5).all()
    assert (shard.records[:3, 2:] == 0).all()
    assert list(shard.state("b")) == ["exp_avg", "exp_avg_sq"]


def test_initial_accumulator_and_zero_columns():
    table = pb.Table("a", 5, 4, initializer=pb.Normal(1.0, zero_columns=1))
    shard = MemoryShard.whole([table], pb.RowWiseAdagrad(lr=1.0, initial_accumulator=0.25), 0)
    assert (shard.state("a")["sum"] == 0.25).all()
    assert (shard.weights("a")[:, 3] == 0).all()
    assert (shard.weights("a")[:, :3] != 0).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: pb.SGD(lr=-1.0),
        lambda: pb.SGD(lr=float("nan")),
        lambda: pb.Adagrad(lr=0.1, eps=float("inf")),
        lambda: pb.Adam(lr=0.1, betas=(0.9, 1.0)),
        lambda: pb.RowWiseAdam(lr=0.1, weight_decay=-0.1),
        lambda: pb.SGD(lr=0.1, max_row_norm=0.0),
    ],
)
def test_bad_optimizers_are_refused(make):
    with pytest.raises(ConfigError):
        make()
