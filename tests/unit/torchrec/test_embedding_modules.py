"""Called as TorchRec's modules are, and with what torch's own embeddings give."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

import pibroch as pb
from pibroch.errors import ConfigError, DataError
from pibroch.torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)

SGD = pb.SGD(lr=0.5)
FEATURES = {"a": [[0, 1], [], [2]], "b": [[3], [4], [4, 4, 1]], "c": [[5], [0], [1]]}


def bag_configs(**others):
    return [
        EmbeddingBagConfig(
            num_embeddings=9, embedding_dim=4, name="t1", feature_names=["a", "b"], **others
        ),
        EmbeddingBagConfig(
            num_embeddings=7,
            embedding_dim=8,
            name="t2",
            feature_names=["b"],
            pooling=PoolingType.MEAN,
        ),
        EmbeddingBagConfig(num_embeddings=6, embedding_dim=8, name="c"),
    ]


def features(weighted=False):
    bags = [bag for key in FEATURES for bag in FEATURES[key]]
    values = torch.tensor([i for bag in bags for i in bag], dtype=torch.int32)
    weights = torch.arange(1, len(values) + 1) / 4 if weighted else None
    return KeyedJaggedTensor(
        list(FEATURES), values, weights, torch.tensor([len(bag) for bag in bags], dtype=torch.int32)
    )


def wanted(collection, ids, readers, weighted):
    """By torch's own function from the collection's weights: name, feature, table, mode."""
    state = collection.state_dict()
    results = {}
    for name, feature, table, mode in readers:
        part = ids[feature]
        weight = state[f"embedding_bags.{table}.weight"]
        scale = part.weights() if weighted else torch.ones(len(part.values()))
        rows = weight[part.values().long()] * scale[:, None]
        sample = torch.arange(3).repeat_interleave(part.lengths())
        total = torch.zeros(3, weight.shape[1]).index_add(0, sample, rows)
        results[name] = total / part.lengths().clamp(min=1)[:, None] if mode == "mean" else total
    return results


READERS = [
    ("a", "a", "t1", "sum"),
    ("b@t1", "b", "t1", "sum"),
    ("b@t2", "b", "t2", "mean"),
    ("c", "c", "c", "sum"),
]


@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_embeddings_have_torchrec_s_names_order_and_values(weighted):
    collection = EmbeddingBagCollection(tables=bag_configs(), is_weighted=weighted, optimizer=SGD)
    out = collection(features(weighted))
    assert isinstance(out, KeyedTensor)
    assert out.keys() == ["a", "b@t1", "b@t2", "c"]
    assert out.length_per_key() == [4, 4, 8, 8] and out.offset_per_key() == [0, 4, 8, 16, 24]
    want = wanted(collection, features(weighted), READERS, weighted)
    torch.testing.assert_close(out.values(), torch.cat([*want.values()], 1))
    for key, part in out.to_dict().items():
        torch.testing.assert_close(part, want[key])
        torch.testing.assert_close(out[key], want[key])
    first, second = KeyedTensor.regroup([out], [["c", "a"], ["b@t1"]])
    torch.testing.assert_close(first, torch.cat([want["c"], want["a"]], 1))
    torch.testing.assert_close(second, want["b@t1"])


def test_tables_of_one_dim_give_the_same_form():
    configs = [
        EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name=name) for name in ("a", "b")
    ]
    collection = EmbeddingBagCollection(configs, False, torch.device("meta"), optimizer=SGD)
    out = collection(features())
    assert (out.keys(), out.length_per_key(), out.values().shape) == (["a", "b"], [4, 4], (3, 8))
    assert [config.feature_names for config in collection.embedding_bag_configs()] == [["a"], ["b"]]
    assert configs[0].feature_names == [], "the user's own is not changed"
    assert not collection.is_weighted() and collection.device == torch.device("cpu")


def test_weights_of_a_batch_count_only_when_asked_for():
    collection = EmbeddingBagCollection(bag_configs(), optimizer=SGD)
    assert torch.equal(
        collection(features(weighted=True)).values(), collection(features()).values()
    )
    with pytest.raises(DataError, match="without weights"):
        EmbeddingBagCollection(bag_configs(), is_weighted=True, optimizer=SGD)(features())


def test_rows_learn_what_torch_s_embedding_bag_learns():
    collection = EmbeddingBagCollection(bag_configs(), optimizer=SGD)
    weights = {
        name: each.clone().requires_grad_() for name, each in collection.state_dict().items()
    }
    ids = features()
    target = torch.randn(3, 24, generator=torch.manual_seed(0))
    for _ in range(3):
        loss = functional.mse_loss(collection(ids).values(), target)
        parts = [
            functional.embedding_bag(
                ids[feature].values().long(),
                weights[f"embedding_bags.{table}.weight"],
                mode=mode,
                offsets=ids[feature].offsets().long(),
                include_last_offset=True,
            )
            for _, feature, table, mode in READERS
        ]
        want = functional.mse_loss(torch.cat(parts, 1), target)
        torch.testing.assert_close(loss, want)
        loss.backward()
        gradients = torch.autograd.grad(want, [*weights.values()])
        with torch.no_grad():
            for weight, gradient in zip(weights.values(), gradients, strict=True):
                weight -= 0.5 * gradient
    for name, weight in collection.state_dict().items():
        torch.testing.assert_close(weight, weights[name].detach())


def ec_configs():
    return [
        EmbeddingConfig(num_embeddings=9, embedding_dim=4, name="t1", feature_names=["a", "b"]),
        EmbeddingConfig(num_embeddings=7, embedding_dim=4, name="t2", feature_names=["b"]),
    ]


def test_vectors_an_id_have_torchrec_s_names_and_values():
    collection = EmbeddingCollection(tables=ec_configs(), need_indices=True, optimizer=SGD)
    assert list(collection.state_dict()) == ["embeddings.t1.weight", "embeddings.t2.weight"]
    assert collection.embedding_names_by_table() == [["a", "b@t1"], ["b@t2"]]
    assert collection.embedding_dim() == 4 and collection.need_indices()
    ids = features(weighted=True)
    out = collection(ids)
    state = collection.state_dict()
    assert list(out) == ["a", "b@t1", "b@t2"]
    for name, feature, table in (("a", "a", "t1"), ("b@t1", "b", "t1"), ("b@t2", "b", "t2")):
        part = out[name]
        assert isinstance(part, JaggedTensor)
        torch.testing.assert_close(
            part.values(), state[f"embeddings.{table}.weight"][ids[feature].values().long()]
        )
        assert part.lengths().tolist() == ids[feature].lengths().tolist()
        assert part.weights().tolist() == ids[feature].values().tolist(), "the ids"
    padded = out["b@t2"].to_padded_dense(2)
    assert padded.shape == (3, 2, 4)
    torch.testing.assert_close(padded[2, 1], state["embeddings.t2.weight"][4])
    assert (padded[0, 1] == 0).all()
    padded.sum().backward()
    moved = (
        state["embeddings.t2.weight"]
        - EmbeddingCollection(ec_configs(), optimizer=SGD).state_dict()["embeddings.t2.weight"]
    )
    assert moved[:, 0].tolist() == pytest.approx([0, 0, 0, -0.5, -1.5, 0, 0]), (
        "the third id was cut off"
    )


def test_state_dicts_go_from_one_to_the_other():
    first, second = (EmbeddingCollection(ec_configs(), optimizer=SGD, seed=seed) for seed in (1, 2))
    second.load_state_dict(first.state_dict())
    assert all(
        torch.equal(first.state_dict()[name], each) for name, each in second.state_dict().items()
    )
    with pytest.raises(RuntimeError, match=r"Missing.*embeddings\.t1"):
        first.load_state_dict(
            {f"embedding_bags.{name}.weight": torch.zeros(1) for name in ("t1", "t2")}
        )


def test_without_samples_and_without_ids():
    nothing = KeyedJaggedTensor(
        [*FEATURES], torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64)
    )
    out = EmbeddingBagCollection(bag_configs(), is_weighted=True, optimizer=SGD)(nothing)
    assert out.values().shape == (0, 24)
    vectors = EmbeddingCollection(ec_configs(), need_indices=True, optimizer=SGD)(nothing)["a"]
    assert vectors.values().shape == (0, 4) and vectors.to_padded_dense().shape == (0, 0, 4)
    assert vectors.to_padded_dense(3).shape == (0, 3, 4) and vectors.weights().shape == (0,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EmbeddingBagCollection(bag_configs()),
            "without an optimizer.*apply_optimizer_in_backward",
        ),
        (lambda: EmbeddingBagCollection(bag_configs(), device="xpu", optimizer=SGD), "device xpu"),
        (
            lambda: EmbeddingBagCollection(ec_configs(), optimizer=SGD),
            "'t1' without pooling.*EmbeddingCollection",
        ),
        (lambda: EmbeddingBagCollection(bag_configs(need_pos=True), optimizer=SGD), "need_pos"),
        (
            lambda: EmbeddingBagCollection([EmbeddingBagConfig(9, 4)], optimizer=SGD),
            "without a name",
        ),
        (lambda: EmbeddingBagCollection([], optimizer=SGD), "no tables"),
        (
            lambda: EmbeddingCollection(
                [*ec_configs(), EmbeddingConfig(3, 8, "x")], optimizer=SGD
            ).embedding_dim(),
            r"dims \[4, 8\]",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_features_that_are_no_such_thing_are_refused():
    with pytest.raises(DataError, match="a dict as a batch"):
        EmbeddingBagCollection(bag_configs(), optimizer=SGD)({"a": torch.tensor([1])})


def test_the_ids_of_a_fed_batch_are_known_again(caplog):
    collection = EmbeddingBagCollection(bag_configs(), optimizer=SGD)
    calls = []
    prepare = collection._prepare
    collection._prepare = lambda batch: calls.append(batch) or prepare(batch)
    batches = [SimpleNamespace(ids=features(), label=i) for i in range(4)]
    with caplog.at_level(logging.WARNING):
        for place, batch in enumerate(collection.feed(batches, key=lambda batch: batch.ids)):
            assert batch is batches[place]
            again = KeyedJaggedTensor(
                batch.ids.keys(), batch.ids.values(), None, batch.ids.lengths()
            )
            collection(again if place % 2 else batch.ids).values().sum().backward()
    assert len(calls) == 4, "each batch is prepared once, when it is read"
    assert collection.step == 4


def test_of_one_object_fed_again_and_again_each_time_is_its_own():
    collection = EmbeddingBagCollection(bag_configs(), optimizer=SGD)
    seen = set()
    for ids in collection.feed([features()] * 3):
        prepared, is_fed = collection._as_prepared(ids)
        assert is_fed and prepared is collection._handed_out[-1][1]
        seen.add(id(prepared))
    assert len(seen) == 3


@pytest.mark.parametrize(("gradient", "less"), [(1e-8, 0.35), (3e-8, 0.16), (1e-6, 0.006)])
def test_eps_counts_where_gradients_are_small(gradient, less):
    """What docs/moving-from-torchrec.md says of it; FBGEMM 1.8 gives the same."""

    def moved(**eps):
        config = EmbeddingBagConfig(
            num_embeddings=3, embedding_dim=4, name="t", init_fn=torch.nn.init.zeros_
        )
        collection = EmbeddingBagCollection([config], optimizer=pb.RowWiseAdagrad(lr=0.1, **eps))
        for _ in range(10):
            (
                collection(
                    KeyedJaggedTensor(["t"], torch.tensor([0]), lengths=torch.tensor([1]))
                ).values()
                * gradient
            ).sum().backward()
        return collection.state_dict()["embedding_bags.t.weight"][0, 0].item()

    assert 1 - moved(eps=1e-8) / moved() == pytest.approx(less, abs=0.005)


@pytest.mark.parametrize("device", [None, *(["cuda"] if torch.cuda.is_available() else [])])
def test_weights_of_ids_learn_where_they_count_and_all_is_where_it_shall_be(device):
    where = torch.device(device or "cpu")
    bags = EmbeddingBagCollection(bag_configs(), is_weighted=True, device=device, optimizer=SGD)
    vectors = EmbeddingCollection(ec_configs(), device=device, need_indices=True, optimizer=SGD)
    model = torch.nn.ModuleList([bags, vectors, torch.nn.Linear(24 + 12, 1)]).to(where)
    ids = features(weighted=True).to(where)
    ids.weights().requires_grad_()
    pooled = model[0](ids)
    part = model[1](ids)["b@t2"]
    results = [
        pooled.values(),
        part.values(),
        part.lengths(),
        part.offsets(),
        part.weights(),
        part.to_padded_dense(3),
    ]
    assert {each.device.type for each in results} == {where.type} == {bags.device.type}
    model[2](torch.cat([pooled.values(), part.to_padded_dense(3).flatten(1)], 1)).sum().backward()
    assert (bags.step, vectors.step) == (1, 1)
    assert (ids.weights().grad != 0).all() and not model[1](ids)["a"].values().isnan().any()
    plain = EmbeddingBagCollection(bag_configs(), optimizer=SGD)
    ignored = features(weighted=True)
    ignored.weights().requires_grad_()
    out = plain(ignored).values()
    assert torch.equal(out, plain(features()).values())
    out.sum().backward()
    assert plain.step == 1 and ignored.weights().grad is None
