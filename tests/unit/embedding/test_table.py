import math
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pibroch as pb
from pibroch.embedding import MemoryShard, RowSpace
from pibroch.errors import ConfigError
from pibroch.torchrec import EmbeddingBagConfig


@pytest.mark.parametrize(
    "fields",
    [
        {"num_rows": 0},
        {"dim": 0},
        {"dim": -3},
        {"dim": 2.5},
        {"pooling": "max"},
        {"dtype": "float16"},
    ],
)
def test_bad_tables_are_refused_by_name(fields):
    with pytest.raises(ConfigError, match="'a'"):
        pb.Table(**({"name": "a", "num_rows": 3, "dim": 2} | fields))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "no tables"),
        ([pb.Table("a", 3, 2), pb.Table("a", 3, 2, features=("b",))], "table 'a' named twice"),
        (
            [pb.Table("a", 3, 2), pb.Table("b", 3, 2, features=("a", "a"))],
            "of table 'b' feature 'a' named twice",
        ),
        ([pb.Table("a", 3, 2), pb.Table("b", 3, 4)], r"dim \[2, 4\]"),
        ([pb.Table("a", 3, 2), pb.Table("b", 3, 2, dtype="bfloat16")], "one dim and dtype"),
    ],
)
def test_tables_that_do_not_go_together(tables, message):
    with pytest.raises(ConfigError, match=message):
        RowSpace(tables)


def test_row_space_lays_tables_end_to_end():
    space = RowSpace(
        [pb.Table("a", 3, 2), pb.Table("b", 5, 2, features=("x", "y")), pb.Table("c", 1, 2)]
    )
    assert space.num_rows == 9
    assert space.first_row == {"a": 0, "b": 3, "c": 8}
    assert space.features == ("a", "x", "y", "c")
    assert space.first_row_of_feature.tolist() == [0, 3, 3, 8]
    assert space.rows_of("b") == slice(3, 8)


def torchrec_config(**fields):
    """What TorchRec's ``EmbeddingBagConfig`` holds."""
    usual = {
        "name": "t",
        "num_embeddings": 7,
        "embedding_dim": 3,
        "feature_names": ["f", "g"],
        "weight_init_max": None,
        "weight_init_min": None,
        "data_type": SimpleNamespace(value="FP32"),
        "pooling": SimpleNamespace(value="MEAN"),
        "num_embeddings_post_pruning": None,
        "need_pos": False,
        "use_virtual_table": False,
    }
    return SimpleNamespace(**(usual | fields))


def test_table_from_torchrec_config():
    assert pb.Table.from_config(torchrec_config()) == pb.Table("t", 7, 3, ("f", "g"), "mean")


@pytest.mark.parametrize("data_type", [SimpleNamespace(value="BF16"), torch.bfloat16])
def test_a_table_of_16_bits_from_torchrec_config(data_type):
    assert pb.Table.from_config(torchrec_config(data_type=data_type)).dtype == "bfloat16"


UNIFORM = partial(torch.nn.init.uniform_, a=-0.25, b=0.75)


@pytest.mark.parametrize(
    ("fields", "initializer"),
    [
        (
            {"init_fn": partial(torch.nn.init.uniform_, a=-math.sqrt(1 / 7), b=math.sqrt(1 / 7))},
            pb.Uniform(),
        ),
        ({"init_fn": UNIFORM}, pb.Uniform(0.5, 0.25)),
        ({"init_fn": torch.nn.init.uniform_}, pb.Uniform(0.5, 0.5)),
        ({"init_fn": partial(torch.nn.init.normal_, std=0.1)}, pb.Normal(0.1)),
        ({"init_fn": torch.nn.init.zeros_}, pb.Zeros()),
        ({"weight_init_min": -0.25, "weight_init_max": 0.75}, pb.Uniform(0.5, 0.25)),
        (
            {"get_weight_init_min": lambda: -3.0, "get_weight_init_max": lambda: 3.0},
            pb.Uniform(3.0),
        ),
    ],
)
def test_initial_weights_are_those_of_the_config(fields, initializer):
    table = pb.Table.from_config(torchrec_config(**fields))
    assert table.initializer == initializer
    weights = MemoryShard.whole([replace(table, num_rows=4000)], pb.SGD(lr=1.0), 0).weights("t")
    if fields.get("init_fn") is UNIFORM:
        assert weights.min() == pytest.approx(-0.25, abs=1e-3) and weights.max() == pytest.approx(
            0.75, abs=1e-3
        )
        assert weights.mean() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data_type": SimpleNamespace(value="FP16")}, "'t' of .*FP16.*; need FP32 or BF16"),
        ({"data_type": torch.float16}, "of torch.float16; need FP32 or BF16"),
        ({"pooling": SimpleNamespace(value="MAX")}, "pooling 'max'"),
        ({"need_pos": True}, "need_pos True"),
        ({"use_virtual_table": True}, "no support for virtual tables"),
        ({"num_embeddings_post_pruning": 3}, "no support for pruning"),
        ({"virtual_table_eviction_policy": "lru"}, "no support for eviction"),
        ({"total_num_buckets": 8}, "no support for buckets of ids"),
        ({"input_dim": 9}, "with input_dim 9"),
        ({"enable_embedding_update": True}, "with enable_embedding_update True"),
        ({"stash_weights": True}, "with stash_weights True.*leave it out"),
        ({"has_feature_processor": True}, "no support for feature processors"),
        ({"name": ""}, "without a name"),
        ({"init_fn": lambda weights: weights.fill_(1)}, "with init_fn"),
        ({"init_fn": partial(torch.nn.init.normal_, mean=1.0)}, "with init_fn"),
        ({"init_fn": partial(torch.nn.init.trunc_normal_, std=1.0)}, "with init_fn"),
        ({"weight_init_min": 1.0, "weight_init_max": -1.0}, "weights from 1.0 to -1.0"),
    ],
)
def test_what_a_table_cannot_do_is_not_left_out(fields, message):
    with pytest.raises(ConfigError, match=message):
        pb.Table.from_config(torchrec_config(**fields))


def test_fields_of_a_later_torchrec_are_taken_only_as_they_are():
    @dataclass
    class LaterConfig(EmbeddingBagConfig):
        magic: list[int] = field(default_factory=list)

    assert pb.Table.from_config(LaterConfig(9, 4, "t")) == pb.Table("t", 9, 4)
    with pytest.raises(ConfigError, match=r"with magic \[3\]; need fields that a table knows"):
        pb.Table.from_config(LaterConfig(9, 4, "t", magic=[3]))


def test_an_embedding_config_pools_nothing():
    config = torchrec_config()
    del config.pooling
    assert pb.Table.from_config(config).pooling == "none"


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
        lambda: pb.Adam(lr=0.1, eps=0.0),
        lambda: pb.RowWiseAdam(lr=0.1, eps=1e-60),
        lambda: pb.Adagrad(lr=0.1, eps=0.0),
        lambda: pb.RowWiseAdam(lr=0.1, weight_decay=-0.1),
        lambda: pb.SGD(lr=0.1, max_row_norm=0.0),
    ],
)
def test_bad_optimizers_are_refused(make):
    with pytest.raises(ConfigError):
        make()
