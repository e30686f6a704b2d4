"""Models of users and items on data whose best hit rate is known, and figures over all items."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pibroch as pb
from pibroch.config.train import TrainConfig
from pibroch.data import EncodedDataset, Loader
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.errors import ConfigError
from pibroch.score.checkpoint import evaluate_checkpoint
from pibroch.serve.retrieval import Items, Retriever
from pibroch.train.all_items import figures_over_all_items
from pibroch.train.in_batch import _following
from small_run import make_config, run_command, train_here

SCHEMA = """
label = "click"
[categorical.user]
min_count = 1
[categorical.item]
min_count = 1
"""
NUM_USERS = 30
NUM_ITEMS = 40
NUM_SAMPLES = 20_000
K = 5
SETTINGS = (
    "model={name='two_tower', dim=16, item_features=['item'], top=[32], vector_width=16}",
    "model.dropout=0.0",  # with the base's 0.2 three seeds lie .63 to .66, without within .004
    "loss.name=in_batch_softmax",
    "train.epochs=8",
    "train.batch_size=500",
    "train.evaluate_every=none",
    "train.checkpoint_every=none",
    "train.top_k=[5]",
    "train.monitor=logloss",
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Clicks drawn from each user's own shares of items, some of which all like."""
    folder = tmp_path_factory.mktemp("planted")
    rng = np.random.default_rng(5)
    liking = rng.normal(size=(NUM_USERS, 4)) @ rng.normal(size=(4, NUM_ITEMS)) / 2
    shares = np.exp(liking + 1.5 * rng.normal(size=NUM_ITEMS))
    shares /= shares.sum(1, keepdims=True)
    users = rng.integers(0, NUM_USERS, NUM_SAMPLES)
    items = [rng.choice(NUM_ITEMS, p=shares[user]) for user in users]
    lines = [f"1,u{user},i{item}" for user, item in zip(users, items, strict=True)]
    (folder / "clicks.csv").write_text("\n".join(["click,user,item", *lines]) + "\n")
    schema = Schema.from_toml(SCHEMA)
    source = TextSource(folder / "clicks.csv", schema.separator, schema.quotes, schema.columns)
    prepare([source], schema, folder / "data", PrepareOptions())
    best = np.sort(shares, 1)[:, -K:].sum(1).mean()
    run, _ = train_here(make_config(folder / "data", *SETTINGS), folder / "run")
    return SimpleNamespace(data=folder / "data", run=run.path, best=best, folder=folder)


def test_the_planted_structure_is_learned(planted):
    """Without the correction frequent items come too late."""
    dataset = EncodedDataset.open(planted.data)
    found = evaluate_checkpoint(planted.run, dataset, "test").tasks["click"]
    config = make_config(planted.data, *SETTINGS, "loss.correct_bias=false")
    run, _ = train_here(config, planted.folder / "uncorrected")
    uncorrected = evaluate_checkpoint(run.path, dataset, "test").tasks["click"]
    assert found["all_hr@5"] > planted.best - 0.03
    assert uncorrected["all_hr@5"] < found["all_hr@5"] - 0.03


def test_figures_are_those_of_all_pairs(planted):
    dataset = EncodedDataset.open(planted.data)
    predictor = pb.Predictor.open(planted.run)
    (batch,) = Loader(dataset.split("test"), NUM_SAMPLES)
    users, wanted = (batch.select((name,)).values for name in ("user", "item"))
    known = np.unique(
        np.concatenate(
            [each.select(("item",)).values.numpy() for each in Loader(dataset.split("train"), 1000)]
        )
    )
    gains = []
    for user, item in zip(users.tolist(), wanted.tolist(), strict=True):
        ids = np.stack([np.full(len(known), user), known])
        pairs = pb.JaggedBatch.from_one_hot(
            batch.dense[:1].expand(len(known), -1),
            batch.keys,
            torch.from_numpy(ids),
            batch.labels[:1].expand(len(known)),
        )
        scores = predictor.logits(pairs).numpy()
        place = int((scores > scores[known == item] + 1e-6).sum()) if item in known else K
        gains.append(1 / np.log2(place + 2) if place < K else 0.0)
    test = dataset.split("test")
    parts = predictor.dense, predictor.looked_up, dataset, test
    figures, in_pieces = (
        figures_over_all_items(*parts, TrainConfig(evaluate_batch_size=size, top_k=(K,)))
        for size in (8192, 17)
    )
    assert in_pieces == pytest.approx(figures)
    assert figures["all_hr@5"] == pytest.approx(np.mean(np.array(gains) > 0), abs=2e-3)
    assert figures["all_ndcg@5"] == pytest.approx(np.mean(gains), abs=2e-3)


def test_evaluate_prints_them(planted):
    arguments = ("evaluate", "--checkpoint", planted.run, "--data", planted.data, "--json")
    told = json.loads(run_command(*arguments).stdout)["tasks"]["click"]
    assert 0 < told["all_ndcg@5"] < told["all_hr@5"] < 1


WALKS = """
label = "click"
[categorical.item]
min_count = 1
[categorical.history]
multi_hot = true
delimiter = "|"
max_length = 4
shares = "item"
"""
FOLLOWS = 0.8
LONGER = ("train.epochs=30", "train.top_k=[1]", "train.monitor='all_hr@1'")


def walks(folder, count, length):
    """Data in which each item is followed by one of its own, or else by any; and by which."""
    rng = np.random.default_rng(6)
    following = rng.permutation(NUM_ITEMS)
    lines = []
    for _ in range(count):
        walk = [int(rng.integers(NUM_ITEMS))]
        while len(walk) < length:
            next_one = following[walk[-1]] if rng.random() < FOLLOWS else rng.integers(NUM_ITEMS)
            walk.append(int(next_one))
        *history, item = (f"i{each}" for each in walk)
        lines.append(f"1,{item},{'|'.join(history)}")
    (folder / "walks.csv").write_text("\n".join(["click,item,history", *lines]) + "\n")
    schema = Schema.from_toml(WALKS)
    source = TextSource(folder / "walks.csv", schema.separator, schema.quotes, schema.columns)
    prepare([source], schema, folder / "data", PrepareOptions())
    return following


def sasrec(folder, *more):
    settings = "dim=16, histories={history='item'}, max_length=4, attention_heads=2"
    model = f"model={{name='sasrec', {settings}}}"
    return make_config(folder / "data", *SETTINGS[1:], model, *LONGER, *more)


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("walked")
    following = walks(folder, 8000, 4)
    run, _ = train_here(sasrec(folder), folder / "run")
    return SimpleNamespace(data=folder / "data", run=run.path, following=following, folder=folder)


def test_a_model_of_sequences_learns_what_comes_next(walked):
    found = evaluate_checkpoint(walked.run, EncodedDataset.open(walked.data), "test")
    best = FOLLOWS + (1 - FOLLOWS) / NUM_ITEMS
    assert best - 0.06 < found.tasks["click"]["all_hr@1"] < best + 0.04


def test_all_positions_teach_more_than_the_last(tmp_path):
    """Of 300 histories of 6 the last 4 items are read: 4 pairs each."""
    walks(tmp_path, 300, 7)
    best = {}
    for is_on in (False, True):
        config = sasrec(tmp_path, f"model.all_positions={str(is_on).lower()}", "train.epochs=60")
        run, _ = train_here(config, tmp_path / str(is_on))
        found = evaluate_checkpoint(run.path, EncodedDataset.open(tmp_path / "data"), "test")
        best[is_on] = found.tasks["click"]["all_hr@1"]
    assert best[True] > best[False] + 0.1
    assert best[True] > FOLLOWS - 0.15, best


def test_all_positions_want_a_loss_of_pairs(walked):
    config = sasrec(
        walked.folder, "model.all_positions=true", "loss.name=bce", "train.monitor=logloss"
    )
    with pytest.raises(ConfigError, match=r"model\.all_positions with the loss 'bce'"):
        train_here(config, walked.folder / "refused")


def test_items_that_follow_are_those_of_plain_python():
    sequences = [[3, 1, 4, 1], [], [5], [9, 2, 6]]
    last = [7, 8, 9, 0]
    lengths = [len(each) for each in sequences]
    history = pb.JaggedBatch(
        torch.zeros(4, 0),
        ("history",),
        torch.tensor([id_ for each in sequences for id_ in each]),
        torch.tensor([0, *np.cumsum(lengths)]),
        torch.zeros(4),
    )
    for most in (1, 2, 3, 9):
        ids, samples = _following(history, most, torch.tensor(last))
        expected = [
            (id_, number)
            for number, (each, item) in enumerate(zip(sequences, last, strict=True))
            for id_ in [*each[-most:][1:], item]
        ]
        assert list(zip(ids.tolist(), samples.tolist(), strict=True)) == expected


def test_a_run_goes_by_the_figure_over_all_items(walked):
    """Evaluations of a run have what `pibroch evaluate` finds, and the best one is kept."""
    lines = [json.loads(line) for line in (walked.run / "metrics.jsonl").read_text().splitlines()]
    seen = [
        each["tasks"]["click"]["all_hr@1"] for each in lines if each.get("split") == "validation"
    ]
    found = evaluate_checkpoint(walked.run, EncodedDataset.open(walked.data), "validation")
    assert found.tasks["click"]["all_hr@1"] == pytest.approx(max(seen))
    assert max(seen) > seen[0] + 0.3


def test_what_comes_next_is_retrieved(walked):
    items = Items("here", {"item": [f"i{number}" for number in range(NUM_ITEMS)]})
    predictor = pb.Predictor.open(walked.run)
    retriever = Retriever(predictor, items)
    assert retriever.user_columns == ("history",)
    histories = [["i3", f"i{number}"] for number in range(NUM_ITEMS)]
    best, logits = retriever({"history": histories}, 3)
    found = np.array([int(row[0][1:]) for row in best])
    assert (found == walked.following).mean() > 0.9
    pairs = {"history": [histories[7]] * 3, "item": best[7]}
    expected = predictor.logits(predictor.encode(pairs))
    torch.testing.assert_close(torch.tensor(logits[7]), expected)


def test_runs_and_evaluations_leave_out_what_users_had(tmp_path):
    rng = np.random.default_rng(4)
    lines = [f"1,u{rng.integers(20)},i{rng.integers(30)}" for _ in range(400)]
    (tmp_path / "clicks.csv").write_text("\n".join(["click,user,item", *lines]) + "\n")
    found = {}
    for group in ("", 'group = "user"'):
        schema = Schema.from_toml(group + SCHEMA)
        data = tmp_path / f"data{len(group)}"
        source = TextSource(
            tmp_path / "clicks.csv", schema.separator, schema.quotes, schema.columns
        )
        prepare([source], schema, data, PrepareOptions())
        for leaves_out in ("true", "false"):
            more = (f"train.leave_out_seen={leaves_out}", "train.monitor=all_hr@5")
            config = make_config(data, *SETTINGS, *more, "train.epochs=1")
            if leaves_out == "true" and not group:
                with pytest.raises(ConfigError, match=r"leave_out_seen with data that have no gro"):
                    train_here(config, tmp_path / "refused")
                continue
            run, _ = train_here(config, tmp_path / f"run{len(found)}")
            told = evaluate_checkpoint(run.path, EncodedDataset.open(data), "test")
            tested = json.loads((run.path / "evaluation.json").read_text())["tasks"]["click"]
            found[group, leaves_out] = told.tasks["click"]["all_hr@5"]
            assert tested["all_hr@5"] == pytest.approx(found[group, leaves_out])
    assert found["", "false"] == found['group = "user"', "false"] < found['group = "user"', "true"]
