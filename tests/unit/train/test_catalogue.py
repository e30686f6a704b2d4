"""Which items there are, and which of them is found: unknown and missing values are none."""

import json
import sys
from contextlib import suppress

import numpy as np
import pytest

from pibroch.cli.main import main
from pibroch.data import EncodedDataset
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.errors import ConfigError, DataError
from pibroch.train.all_items import figures_over_all_items
from pibroch.train.catalogue import ItemsOfFile, TrainedItems
from pibroch.train.session import build_session
from small_run import make_config, train_here

SCHEMA = """
label = "click"
group = "user"
[categorical.user]
min_count = 1
[categorical.item]
{encoding}
[categorical.genre]
min_count = 1
[categorical.tags]
multi_hot = true
min_count = 1
[categorical.history]
multi_hot = true
shares = "item"
"""
TRAIN = [
    # click, user, item, genre, tags, history; i3 stands in histories alone, once1 and once2 once
    "1,u1,i1,g1,t1|t2,i2|i3",
    "1,u2,i2,g2,,i3|once1",
    "0,u1,i1,g9,t9,i2",
    "1,u2,once2,g3,t1,i1",
    "1,,,g4,t1,",
    "1,u3,,g4,t1,",
]
TEST = [
    "1,u1,i1,g1,t1,i2",
    "1,u2,new1,g3,t1,i1",
    "1,u3,i3,g3,t1,",
    "0,u3,i2,g3,t1,",
    "1,u1,,g1,t1,",
]
TWO_TOWER = "dim=4, top=[8], vector_width=4, dropout=0.0"


def dataset_of(folder, encoding="", train=TRAIN, test=TEST):
    schema = Schema.from_toml(SCHEMA.format(encoding=encoding))
    sources = []
    for name, lines in (("train", train), ("test", test)):
        path = folder / f"{name}.csv"
        path.write_text("\n".join(["click,user,item,genre,tags,history", *lines]) + "\n")
        sources.append(TextSource(path, schema.separator, schema.quotes, schema.columns))
    prepare(sources, schema, folder / "data", PrepareOptions(SplitRule("files", files=(1, 0, 1))))
    return EncodedDataset.open(folder / "data")


def rows_of(dataset, *names):
    return dataset.encoders["item"].encode(names)[0].tolist()


def bags_of(batch, key):
    bags = batch.pick((key,))
    return [each.tolist() for each in bags.values.split(bags.lengths().tolist())]


def test_all_items_are_those_with_a_count_and_none_is_unknown_or_missing(tmp_path):
    dataset = dataset_of(tmp_path)
    items = TrainedItems(dataset, ("item",))
    assert rows_of(dataset, "once1", "new1", None) == [0, 0, 1]
    assert items.ids.tolist() == sorted(rows_of(dataset, "i1", "i2", "i3"))
    batch = items.batch(np.arange(3))
    assert bags_of(batch, "item") == [[row] for row in items.ids.tolist()]
    assert all(bags_of(batch, key) == [[]] * 3 for key in ("user", "genre", "tags", "history"))


def test_raw_ids_are_items_but_for_the_missing_one(tmp_path):
    dataset = dataset_of(tmp_path, 'encoding = "raw"')
    items = TrainedItems(dataset, ("item",))
    assert items.ids.tolist() == sorted(rows_of(dataset, "i1", "i2", "i3", "once1", "once2"))


def test_an_item_has_the_features_of_its_first_sample_or_misses_them(tmp_path):
    dataset = dataset_of(tmp_path)
    items = TrainedItems(dataset, ("item", "genre", "tags"))
    batch = items.batch(np.arange(3))
    genres, tags = ([row[0] for row in bags_of(batch, "genre")], bags_of(batch, "tags"))
    (one, two, three) = (
        items.ids.tolist().index(row) for row in rows_of(dataset, "i1", "i2", "i3")
    )
    wanted = dataset.encoders["genre"].encode(["g1", "g2", None])[0].tolist()
    assert [genres[one], genres[two], genres[three]] == wanted
    assert tags[one] == dataset.encoders["tags"].encode(["t1|t2"])[0].tolist()
    assert tags[two] == tags[three] == []
    some = items.batch(np.array([three]))
    assert bags_of(some, "genre") == [[1]] and bags_of(some, "tags") == [[]]


def test_a_file_has_all_items_but_unknown_ones(tmp_path):
    dataset = dataset_of(tmp_path)
    path = tmp_path / "items.csv"
    path.write_text("item,genre,other\nnew1,g1,x\ni2,g3,x\ni1,g2,x\ni2,g1,x\n,g1,x\n")
    items = ItemsOfFile(dataset, ("item", "genre"), path)
    assert items.ids.tolist() == sorted(rows_of(dataset, "i1", "i2"))
    batch = items.batch(np.arange(2))
    genres = dict(zip(items.ids.tolist(), bags_of(batch, "genre"), strict=True))
    wanted = dataset.encoders["genre"].encode(["g2", "g3"])[0].tolist()
    assert [genres[row] for row in rows_of(dataset, "i1", "i2")] == [[row] for row in wanted]
    with pytest.raises(DataError, match="without the column `tags`"):
        ItemsOfFile(dataset, ("item", "tags"), path)


def session_of(dataset, *more, model=f"{{name='two_tower', item_features=['item'], {TWO_TOWER}}}"):
    settings = (f"model={model}", "loss.name=in_batch_softmax", "train.monitor=logloss")
    return build_session(make_config(dataset.path, *settings, *more), dataset)


def figures(session, split="test"):
    with session.predicting() as predicting:
        return figures_over_all_items(
            predicting.model,
            predicting.looked_up,
            session.dataset,
            session.dataset.split(split),
            session.config.train,
        )


def test_an_item_that_training_has_not_seen_is_a_miss(tmp_path):
    """Of the four clicks of the test split two are of items: with k = 3 these alone are found."""
    session = session_of(dataset_of(tmp_path), "train.top_k=[3]")
    assert figures(session)["all_hr@3"] == 2 / 4


def test_items_of_a_file_are_all_there_are(tmp_path):
    dataset = dataset_of(
        tmp_path, 'encoding = "integer"\nnum_buckets = 9', ["1,u,3,g,t,4"], ["1,u,7,g,t,"]
    )
    path = tmp_path / "items.csv"
    found = {}
    for numbers in ("", "34", "0123478"):
        path.write_text("\n".join(["item", *numbers]) + "\n")
        more = [f"train.items={str(path)!r}"] if numbers else []
        session = session_of(dataset, "train.top_k=[2, 7]", *more)
        found[numbers] = figures(session)["all_hr@7"]
    assert found == {"": 0, "34": 0, "0123478": 1}


def test_files_that_give_no_items_are_refused_before_training(tmp_path):
    dataset = dataset_of(tmp_path)
    path = tmp_path / "items.csv"
    path.write_text("item\nnew1\nnew2\n")
    with pytest.raises(DataError, match="none of which the data know"):
        session_of(dataset, f"train.items={str(path)!r}")
    with pytest.raises(DataError, match="cannot be read"):
        session_of(dataset, f"train.items={str(tmp_path / 'absent.csv')!r}")
    config = make_config(dataset.path, f"train.items={str(path)!r}")
    with pytest.raises(ConfigError, match="items for a"):
        build_session(config, dataset)
    of_tags = f"{{name='two_tower', item_features=['tags'], {TWO_TOWER}}}"
    with pytest.raises(ConfigError, match="of items with one id each"):
        session_of(dataset, f"train.items={str(path)!r}", "loss.name=bce", model=of_tags)


def test_data_without_known_items_have_no_figures(tmp_path, caplog):
    lines = [f"1,u1,once{number},g1,t1," for number in range(4)]
    session = session_of(dataset_of(tmp_path, train=lines), "train.top_k=[3]")
    assert np.isnan(figures(session)["all_hr@3"])
    assert "no items that are known" in caplog.text


def test_a_checkpoint_is_evaluated_with_a_file_of_items(tmp_path, monkeypatch, capsys):
    dataset = dataset_of(tmp_path)
    run, _ = train_here(session_of(dataset).config, tmp_path / "run")
    path = tmp_path / "items.csv"
    path.write_text("item\ni3\n")
    words = ["evaluate", "--checkpoint", str(run.path), "--data", str(dataset.path), "--json"]
    found = []
    for more in ((), ("--items", str(path))):
        monkeypatch.setattr(sys, "argv", ["pibroch", *words, *more])
        with suppress(SystemExit):
            main()
        found.append(json.loads(capsys.readouterr().out)["tasks"]["click"]["all_hr@10"])
    assert found == [2 / 4, 1 / 4]


def test_what_a_user_had_is_left_out_without_a_validation_split(tmp_path):
    """All other items were clicked by the group, or stand in its histories, or in the sample's."""
    test = ["1,u1,i1,g1,t1,", "1,u1,i3,g1,t1,", "1,u9,i3,g1,t1,i1|i2"]
    dataset = dataset_of(tmp_path, test=test)
    assert dataset.samples["validation"] == 0
    session = session_of(dataset, "train.leave_out_seen=true", "train.top_k=[1]")
    assert figures(session)["all_hr@1"] == 1
