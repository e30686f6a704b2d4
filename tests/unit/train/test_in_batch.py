"""What the loss over a batch's items compares: pairs whose item is known."""

import pytest
import torch

from pibroch.data import EncodedDataset, Loader
from pibroch.data.loader import batch_of
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.errors import ConfigError
from pibroch.train.session import build_session
from small_run import make_config

SCHEMA = """
label = "click"
[categorical.user]
min_count = 1
[categorical.item]
[categorical.genre]
min_count = 1
[categorical.history]
multi_hot = true
{shares}
"""
ITEMS = ["i1", "i2", "once1", "i1", "", "i3", "i2", "i3", "once2"]
HISTORIES = ["i1|i2", "", "i3|once3|i1", "once4", "i2", "||", "i1|i1", "i3", "i2|i1"]


def session_of(folder, model, shares='shares = "item"'):
    schema = Schema.from_toml(SCHEMA.format(shares=shares))
    rows = zip(ITEMS, HISTORIES, strict=True)
    lines = [f"1,u{n},{item},g{n % 2},{history}" for n, (item, history) in enumerate(rows)]
    path = folder / "clicks.csv"
    path.write_text("\n".join(["click,user,item,genre,history", *lines]) + "\n")
    source = TextSource(path, schema.separator, schema.quotes, schema.columns)
    prepare([source], schema, folder / "data", PrepareOptions(split=SplitRule.parse("none")))
    settings = ("loss={name='in_batch_softmax', correct_bias=false}", "train.monitor=logloss")
    config = make_config(folder / "data", f"model={model}", *settings)
    return build_session(config, EncodedDataset.open(folder / "data"))


TWO_TOWER = "{name='two_tower', item_features=['item', 'genre'], dim=4, top=[8], dropout=0.0}"
SASREC = (
    "{name='sasrec', histories={history='item'}, dim=4, max_length=3, dropout=0.0,"
    " all_positions=true}"
)


def items_of(batch, is_sequence):
    """The items of all pairs, by plain Python."""
    wanted = batch.pick(("item",)).values.tolist()
    if not is_sequence:
        return wanted
    history = batch.pick(("history",))
    bags = [each.tolist() for each in history.values.split(history.lengths().tolist())]
    return [id_ for bag, item in zip(bags, wanted, strict=True) for id_ in [*bag[-3:][1:], item]]


@pytest.mark.parametrize("model", [TWO_TOWER, SASREC], ids=["two_tower", "sasrec"])
def test_unknown_and_missing_items_are_neither_positives_nor_negatives(model, tmp_path):
    session = session_of(tmp_path, model)
    (batch,) = Loader(session.dataset.split("train"), 100)
    session.set_training(True)
    loss = session.loss(batch, 1)
    session.model(batch.dense, session.embeddings(batch))
    pairs = session.model.take_pairs()
    ids = torch.tensor(items_of(batch, model == SASREC))
    known = (ids > 1).nonzero()[:, 0].tolist()
    assert {0, 1} < {*ids.tolist()} and len(known) > 4
    losses = []
    for one in known:
        others = [other for other in known if other == one or ids[other] != ids[one]]
        logits = pairs.items[others] @ pairs.users[one]
        losses.append(logits.logsumexp(0) - pairs.users[one] @ pairs.items[one])
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(loss, expected)
    weights = [*session.model.parameters()]
    found = torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=True)
    wanted = torch.autograd.grad(expected, weights, allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_unknown_items_share_no_vector_with_each_other(tmp_path):
    """Some are of another genre, so that none would be computed once for all its samples."""
    session = session_of(tmp_path, TWO_TOWER.replace("0.0", "0.5"))
    (batch,) = Loader(session.dataset.split("train"), 100)
    session.criterion.show_items(batch)
    ids = batch.pick(("item",)).values
    shown = session.model.item_ids
    assert torch.equal(shown[ids > 1], ids[ids > 1])
    unknown = shown[ids < 2].tolist()
    assert len({*unknown}) == len(unknown) > 2 and max(unknown) < 0
    session.set_training(True)
    session.loss(batch, 1).backward()


def test_a_batch_of_unknown_items_alone_changes_nothing(tmp_path):
    session = session_of(tmp_path, TWO_TOWER)
    train = session.dataset.split("train")
    unknown = (train.ids_of("item") < 2).nonzero()[0]
    session.set_training(True)
    loss = session.loss(batch_of(train, unknown), 1)
    assert loss == 0
    loss.backward()
    assert all(not each.grad.any() for each in session.model.parameters())


def test_a_sequence_of_other_ids_than_items_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="whose ids are not those of 'item'"):
        session_of(tmp_path, SASREC, shares="")
