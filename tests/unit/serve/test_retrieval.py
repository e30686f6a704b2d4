"""The best items for users: against all scores, over HTTP, and while versions change."""

import shutil
import sys
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch

import pibroch as pb
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.errors import ConfigError, DataError, MissingDependencyError
from pibroch.serve import retrieval
from pibroch.serve.delta import export_delta
from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.serve.graph_index import GraphIndex
from pibroch.serve.retrieval import ExactIndex, Items, Retriever, recall_of
from pibroch.serve.sampled_users import sampled_users
from served import check_documented, serving, until
from several_labels import prepared
from small_run import make_config, run_command, train_here

CLICK = """
label = "click"
[target.click]
values = { no = 0, yes = 1 }
[dense.age]
transform = "identity"
[categorical.user]
min_count = 1
[categorical.item]
min_count = 1
"""
USERS = [{"user": f"u{number}", "age": str(number / 40)} for number in range(40)]
ITEMS = [f"i{number}" for number in range(25)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with an export of an early step and a delta to its last one."""
    folder = tmp_path_factory.mktemp("retrieval")
    config = make_config(
        prepared(folder, CLICK, count=3000),
        "model={name='two_tower', dim=8, item_features=['item'], top=[16], vector_width=8}",
        "loss.name=in_batch_softmax",
        "train.epochs=none",
        "train.steps=60",
        "train.checkpoint_every=30",
        "train.evaluate_every=60",
        "train.full_checkpoint_every=2",
    )
    run, _ = train_here(config, folder / "run")
    steps = run.path / "checkpoints"
    export_checkpoint(steps / "step-00000030", folder / "versions" / "1", ExportOptions())
    export_delta(steps / "step-00000060", folder / "versions" / "1", folder / "2")
    items = folder / "items.csv"
    pl.DataFrame({"item": ITEMS}).write_csv(items)
    return SimpleNamespace(folder=folder, run=run, items=items, first=folder / "versions" / "1")


def expected(predictor, k):
    """The best items by the scores of all pairs, and these."""
    pairs = [{**user, "item": item} for user in USERS for item in ITEMS]
    logits = predictor.logits(predictor.encode(pairs)).reshape(len(USERS), -1)
    best = logits.topk(k)
    return [[ITEMS[place] for place in row] for row in best.indices.tolist()], best.values.numpy()


def columns_of(users):
    return {name: [user[name] for user in users] for name in ("user", "age")}


@pytest.mark.parametrize("at_once", [1 << 24, 60])
def test_the_best_are_those_that_score_best(trained, monkeypatch, at_once):
    monkeypatch.setattr(retrieval, "NUMBERS_AT_ONCE", at_once)
    monkeypatch.setattr(retrieval, "_ITEMS_AT_ONCE", 8)
    predictor = pb.Predictor.open(trained.first)
    retriever = Retriever(predictor, Items.read(trained.items))
    assert set(retriever.user_columns) == {"user", "age"} and retriever.num_items == 25
    items, scores = retriever(columns_of(USERS), 5)
    right, values = expected(predictor, 5)
    assert items == right
    np.testing.assert_allclose(scores, values, rtol=1e-4, atol=1e-5)
    everything, _ = retriever(columns_of(USERS), 1000)
    assert all(sorted(row) == sorted(ITEMS) for row in everything)


def test_exact_search_in_parts_is_that_of_the_whole(monkeypatch):
    torch.manual_seed(3)
    index = ExactIndex(torch.randn(50, 4))
    users = torch.randn(9, 4)
    whole = index.search(users, 7)
    monkeypatch.setattr(retrieval, "NUMBERS_AT_ONCE", 100)
    for part, right in zip(index.search(users, 7), whole, strict=True):
        torch.testing.assert_close(part, right)


KINDS = ("alike", "of one length", "of many lengths", "in clusters", "leaning", "copied", "unseen")


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_finds_nearly_all_of_the_best(kind):
    generator = torch.Generator().manual_seed(5)
    items = torch.randn(5000, 16, generator=generator)
    users = torch.randn(100, 16, generator=generator)
    if kind == "of one length":
        items = torch.nn.functional.normalize(items)
    elif kind == "of many lengths":
        items *= torch.empty(5000, 1).exponential_(generator=generator)
    elif kind == "in clusters":
        centres = torch.randn(20, 16, generator=generator)
        items = items / 2 + centres[torch.arange(5000) % 20]
        users = users / 2 + centres[torch.arange(100) % 20]
    elif kind == "leaning":  # as towers do that learn how often items are clicked at all
        items = items / 4 + torch.randn(16, generator=generator)
        users = users / 4 + torch.randn(16, generator=generator)
    elif kind == "copied":
        items[::2] = items[torch.arange(2500) % 20 * 2 + 1]
    elif kind == "unseen":  # of one vector, better than all others for half of the users
        items[torch.rand(5000, generator=generator) < 0.9] = 3 * items[0]
    graph = GraphIndex(items)
    scores, places = graph.search(users, 10)
    best_scores, best = ExactIndex(items).search(users, 10)
    assert recall_of(graph, ExactIndex(items), users, 10) >= 0.95
    assert (scores >= best_scores[:, -1:] - 1e-4).float().mean(1).min() >= 0.5, "of each user"
    assert all(len({*row}) == 10 for row in places.tolist())
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    torch.testing.assert_close(scores, (users[:, None] * items[places]).sum(2))
    same = (places == best).all(1)
    assert same.any() or kind in ("copied", "unseen"), "ties have no order"
    torch.testing.assert_close(scores[same], best_scores[same])


class LongestItems:
    """An index that gives everybody the items with the longest vectors."""

    def __init__(self, items):
        self._items = items
        self._places = items.norm(dim=1).argsort(descending=True)

    def search(self, users, k):
        scores, order = (users @ self._items[self._places[:k]].T).sort(1, descending=True)
        return scores, self._places[:k][order]


def test_an_index_that_misses_too_much_is_not_used(trained, caplog):
    predictor = pb.Predictor.open(trained.first)
    exact, graph, longest = (
        Retriever(predictor, Items.read(trained.items, index))
        for index in (ExactIndex, GraphIndex, LongestItems)
    )
    assert exact.is_exact and exact.recall is None
    assert not graph.is_exact and graph.recall >= 0.99
    assert longest.is_exact and 0 < longest.recall < 0.95
    warning = f"finds {longest.recall:.1%} of the best: exact search answers, 95% are needed"
    assert warning in caplog.text and predictor.version in caplog.text
    for retriever in (graph, longest):
        assert retriever(columns_of(USERS), 5)[0] == exact(columns_of(USERS), 5)[0]


def test_sampled_users_are_those_that_a_version_knows(trained):
    predictor = pb.Predictor.open(trained.first)
    users = sampled_users(predictor, 500)
    known = predictor.encode([{**user, "item": ITEMS[0]} for user in USERS]).pick(("user",)).values
    assert {*users.pick(("user",)).values.tolist()} == {*known.tolist()}
    assert users.dense.std() > 0.5
    again = sampled_users(predictor, 500)
    assert again.values.equal(users.values) and again.dense.equal(users.dense)


@pytest.mark.parametrize("count", [1, 3, 300])
def test_a_graph_finds_all_where_all_are_wanted(count):
    torch.manual_seed(6)
    items = torch.randn(count, 4)
    users = torch.randn(7, 4)
    _, places = GraphIndex(items).search(users, count)
    assert all(sorted(row) == list(range(count)) for row in places.tolist())


class LostGraph:
    """Faiss' graph where a search comes to an end before it has found as many as are wanted."""

    def search(self, users, k, params):
        found = np.tile(np.arange(k), (len(users), 1))
        found[-1, 1:] = -1
        return np.zeros((len(users), k), np.float32), found


def test_where_a_graph_leads_to_too_few_all_items_are_compared():
    torch.manual_seed(6)
    items, users = torch.randn(30, 4), torch.randn(3, 4)
    index = GraphIndex(items)
    index._graph = LostGraph()
    for found, right in zip(
        index.search(users, 5), ExactIndex(items).search(users, 5), strict=True
    ):
        assert torch.equal(found, right)


def test_items_that_are_all_alike_are_found_by_a_graph():
    scores, places = GraphIndex(torch.ones(200, 4)).search(torch.ones(1, 4), 200)
    assert scores.unique().tolist() == [4.0]
    assert sorted(places[0].tolist()) == list(range(200))


def test_a_graph_without_its_extra_is_refused(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingDependencyError, match=r"pibroch\[retrieval\]"):
        GraphIndex(torch.ones(2, 2))
    retriever = Retriever(pb.Predictor.open(trained.first), Items.read(trained.items))
    assert retriever(columns_of(USERS), 2)[0], "exact search needs no extra"


def test_a_graph_of_no_items_is_refused(trained):
    done = run_command("serve", trained.first, "--items-index", "graph")
    assert done.returncode == 2
    assert "--items-index graph without --items" in done.stderr


def test_items_that_do_not_fit_are_refused(trained, tmp_path):
    predictor = pb.Predictor.open(trained.first)
    with pytest.raises(DataError, match="without the column `item`"):
        Retriever(predictor, Items("here", {"film": ["i1"]}))
    with pytest.raises(DataError, match="two have one id"):
        Retriever(predictor, Items("here", {"item": ["i1", "i2", "i1"]}))
    with pytest.raises(DataError, match="cannot be read"):
        Items.read(tmp_path / "absent.parquet")
    (tmp_path / "none.csv").write_text("item\n")
    with pytest.raises(DataError, match="no rows"):
        Items.read(tmp_path / "none.csv")


def test_items_that_training_never_saw_are_not_retrieved(trained, caplog):
    """Their vectors are all alike: if one were the best for a user, all would be."""
    predictor = pb.Predictor.open(trained.first)
    new = [f"new{number}" for number in range(100)]
    retriever = Retriever(predictor, Items("here", {"item": [*new, *ITEMS, None]}))
    assert "101 of 126 items in here are not known" in caplog.text
    assert retriever.num_items == len(ITEMS)
    items, _ = retriever(columns_of(USERS), 5)
    assert items == expected(predictor, 5)[0]
    with pytest.raises(DataError, match=r"none of which version .* knows, such as 'new0'"):
        Retriever(predictor, Items("here", {"item": new}))


def test_a_bag_is_known_by_one_of_its_ids(trained):
    predictor = pb.Predictor.open(trained.first)
    bags = [[], [0, 1], [0, 5], [2, 3], [1]]
    batch = pb.JaggedBatch(
        torch.zeros(5, 1),
        ("item",),
        torch.tensor([id_ for bag in bags for id_ in bag]),
        torch.tensor([0, *np.cumsum([*map(len, bags)])]),
        torch.zeros(5),
    )
    assert predictor.knows(batch, "item").tolist() == [False, False, True, True, False]


RAW_ITEMS = """
label = "click"
[categorical.user]
min_count = 1
[categorical.item]
encoding = "raw"
"""


@pytest.mark.parametrize("unknown_row", ["true", "false"])
def test_raw_ids_without_a_row_are_not_retrieved(tmp_path, unknown_row):
    """An id has a row from its second time on, which once1 has not come to."""
    schema = Schema.from_toml(RAW_ITEMS)
    lines = [f"1,u{number % 3},i{number % 5}" for number in range(200)]
    path = tmp_path / "clicks.csv"
    path.write_text("\n".join(["click,user,item", *lines, "1,u1,once1"]) + "\n")
    source = TextSource(path, schema.separator, schema.quotes, schema.columns)
    prepare([source], schema, tmp_path / "data", PrepareOptions(SplitRule.parse("none")))
    rows = f"name='hashed', capacity=30, admit_after=2, unknown_row={unknown_row}"
    config = make_config(
        tmp_path / "data",
        "model={name='two_tower', dim=4, item_features=['item'], top=[4], vector_width=4}",
        f"embedding.tables.item.rows={{{rows}}}",
        "loss={name='in_batch_softmax', correct_bias=false}",
        "train.monitor=logloss",
        "train.epochs=1",
    )
    run, _ = train_here(config, tmp_path / "run")
    export_checkpoint(run.path, tmp_path / "export", ExportOptions())
    known = [f"i{number}" for number in range(5)]
    items = Items("here", {"item": ["new1", "once1", *known, ""]})
    for trained_in in (run.path, tmp_path / "export"):
        retriever = Retriever(pb.Predictor.open(trained_in), items)
        (found,), _ = retriever({"user": ["u1"]}, 100)
        assert sorted(found) == known


def test_items_of_another_model_are_refused(clicks, tmp_path):
    with pytest.raises(ConfigError, match="need a two_tower or sasrec model"):
        Retriever(pb.Predictor.open(clicks.run), Items("here", {"item": ["i1"]}))


@pytest.mark.parametrize("index", ["exact", "graph"])
def test_a_server_retrieves_and_follows_versions(trained, tmp_path, index):
    """Of 25 items a graph finds the best ones, too."""
    versions = shutil.copytree(trained.folder / "versions", tmp_path / "versions")
    predictors = [pb.Predictor.open(trained.first)]
    shutil.copytree(trained.folder / "2", tmp_path / "coming")
    options = ("--items", trained.items, "--items-index", index, "--reload-every", 0.05)
    with serving(versions, *options) as server:

        def retrieve():
            return server.ask("POST", "/retrieve", {"rows": USERS, "k": 4}).json

        def check(answer, predictor):
            items, scores = expected(predictor, 4)
            assert answer["model_version"] == predictor.version
            assert answer["items"] == items
            np.testing.assert_allclose(answer["scores"], scores, rtol=1e-4, atol=1e-5)

        check(retrieve(), predictors[0])
        for body, reason in (
            ({"rows": USERS, "k": 0}, "got 0 as `k`; need a whole number from 1 to 1000"),
            ({"rows": USERS, "k": True}, "got True as `k`"),
            ({"rows": USERS, "k": 1001}, "got 1001 as `k`"),
            ([*USERS], "got no JSON object"),
            ({"rows": []}, "got 0 rows; need 1 to 8192"),
            ({"rows": [{"user": "u1"}]}, "got row 0 without `age`"),
            ({"rows": [{"user": "u1", "age": "old"}]}, "age"),
            ({"rows": USERS, "n": 5}, "got JSON of another form"),
        ):
            answer = server.ask("POST", "/retrieve", body)
            assert answer.status == 400 and reason in answer.reason, answer.reason
        one = {"columns": columns_of(USERS[:1]), "rows": None, "k": None}
        one = server.ask("POST", "/retrieve", one).json
        assert len(one["items"]) == 1 and len(one["items"][0]) == 10
        (tmp_path / "coming").rename(versions / "2")
        predictors.append(pb.Predictor.open(versions / "2"))
        assert expected(predictors[0], 4)[0] != expected(predictors[1], 4)[0]
        until(lambda: retrieve()["model_version"] == predictors[1].version)
        check(retrieve(), predictors[1])
        assert server.metric('pibroch_requests_total{endpoint="retrieve",status="400"}') == 8
        assert server.metric("pibroch_retrieval_is_exact") == (index == "exact")
        if index == "graph":
            assert server.metric("pibroch_retrieval_recall") >= 0.99
        page = server.ask("GET", "/openapi.json").json
        for users in (USERS, []):
            answer = server.ask("POST", "/retrieve", {"rows": users})
            check_documented(page, "POST", "/retrieve", answer)
        assert "Traceback" not in server.complaints()


def test_workers_that_are_forked_retrieve_by_a_graph(trained):
    options = ("--items", trained.items, "--items-index", "graph", "--workers", 2)
    with serving(trained.first, *options) as server:
        for _ in range(8):
            answer = server.ask("POST", "/retrieve", {"rows": USERS, "k": 4}).json
            assert answer["items"] == expected(pb.Predictor.open(trained.first), 4)[0]


def test_a_server_without_items_says_so(trained):
    with serving(trained.first) as server:
        answer = server.ask("POST", "/retrieve", {"rows": USERS})
        assert answer.status == 404 and "need `--items FILE`" in answer.reason


def test_an_answer_that_is_too_long_is_refused_before_it_is_worked_out(trained):
    """What is refused is what can be longer than a body, be it of one user with `k` of all."""
    many = {name: values * 20 for name, values in columns_of(USERS).items()}
    options = ("--items", trained.items, "--max-body-mb", 0.125, "--max-total-mb", 0.5)
    with serving(trained.first, *options) as server:
        for k in (5, 25, 1000):
            answer = server.ask("POST", "/retrieve", {"columns": many, "k": k})
            if k == 5:
                assert answer.status == 200 and len(answer.body) < 1 << 17
                continue
            assert answer.status == 400 and "retry-after" not in answer.headers
            assert f"got 800 rows, whose {k} best items are up to" in answer.reason
            assert "need at most 131,072 in an answer" in answer.reason
