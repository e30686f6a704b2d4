"""A recipe chooses row indices, for all columns and for single ones; what knows rows alone refuses.

Over real processes: tests/distributed/test_row_index_train.py.
"""

import os
import shutil
import sys
import tomllib

import numpy as np
import pytest

from doc_pages import ROOT
from pibroch.cli.main import main
from pibroch.config import load_recipe, to_toml
from pibroch.config.recipes import check_config
from pibroch.config.registry import IMPORTS
from pibroch.config.row_index import ROW_INDICES
from pibroch.data import EncodedDataset, Loader
from pibroch.embedding import AfterCount, Hashed, Identity, LeastFrequent, LeastRecent
from pibroch.errors import CheckpointError, ConfigError
from pibroch.serve.delta import export_delta
from pibroch.serve.export import export_checkpoint
from pibroch.serve.predictor import Predictor
from pibroch.train import convert
from pibroch.train.run_directory import RunDirectory
from pibroch.train.session import build_session, build_tables
from served import serving
from small_run import make_config, run_command, train_here

SHARED = "embedding.rows={name='own_row_index:Shared', capacity=50}"  # more than any column has ids
SHORT = ("train.epochs=none", "train.steps=4", "train.checkpoint_every=2")


@pytest.fixture(autouse=True)
def own(monkeypatch):
    """The example is on the path; nothing is registered, imported or allowed yet."""
    monkeypatch.delitem(sys.modules, "own_row_index", raising=False)
    monkeypatch.setenv(IMPORTS, "")
    monkeypatch.setattr(ROW_INDICES, "_registered", {})
    monkeypatch.syspath_prepend(ROOT / "examples")
    yield
    sys.modules.pop("own_row_index", None)


def sizes(session):
    return {table.name: (table.num_rows, table.rows.name) for table in session.embeddings.tables}


def test_a_column_s_own_stands_in_place_of_that_of_all(data):
    small = "{name='own_row_index:Shared', capacity=7}"
    own = f"embedding.tables={{C3={{rows='identity'}}, C4={{rows={small}}}}}"
    dataset = EncodedDataset.open(data)
    config = make_config(data, SHARED, own)
    assert check_config(tomllib.loads(to_toml(config.model_dump())), "as a file") == config
    tables = sizes(build_session(config, dataset))
    assert tables.pop("C3") == (dataset.num_rows["C3"], "identity")
    assert tables.pop("C4") == (7, "shared")
    assert set(tables.values()) == {(50, "shared")}


def test_raw_ids_need_rows_of_a_capacity_of_its_own():
    ids = {"user": None, "city": 40}
    need = (
        r"'identity' for column 'user', whose ids are raw; need an index with a capacity of its own"
    )
    with pytest.raises(ConfigError, match=f"{need}.*; do: write .*embedding.tables.user.rows"):
        build_tables(make_config("data"), ids)
    rows = "embedding.rows={name='hashed', capacity=300, admit_after=3, sketch=true}"
    user, city = build_tables(make_config("data", rows), ids)
    assert user.rows == city.rows == Hashed(AfterCount(3, sketch=True), LeastRecent())
    assert (user.num_rows, city.num_rows) == (300, 40), "no more rows than ids"
    own = "{name='hashed', capacity=9, evict='least_frequent', half_life=7, expire_after=50}"
    user, city = build_tables(make_config("data", f"embedding.tables={{user={{rows={own}}}}}"), ids)
    assert user.rows == Hashed(evict=LeastFrequent(7), expire_after=50) and user.num_rows == 9
    assert city.rows == Identity() and city.num_rows == 40


def test_it_trains_goes_on_and_predicts(data, tmp_path):
    """Where no two ids share a row the numbers are those of ids that are rows."""
    plain, expected = train_here(make_config(data, *SHORT), tmp_path / "plain")
    config = make_config(data, SHARED, *SHORT)
    run, result = train_here(config, tmp_path / "run")
    assert result.summary.auc == expected.summary.auc
    train_here(make_config(data, SHARED, *SHORT, "train.steps=2"), tmp_path / "again")
    again, resumed = train_here(config, tmp_path / "again")
    assert resumed.summary.auc == result.summary.auc
    batch = next(iter(Loader(EncodedDataset.open(data).split("test"), 50)))
    scores = [Predictor.open(each.path).logits(batch) for each in (plain, run, again)]
    assert scores[0].equal(scores[1]) and scores[0].equal(scores[2])
    small, _ = train_here(make_config(data, SHARED.replace("50", "3"), *SHORT), tmp_path / "small")
    assert not scores[0].equal(Predictor.open(small.path).logits(batch))
    with pytest.raises(CheckpointError, match=r"3 rows x 4 .*row index \{'name': 'shared'\}.*50"):
        train_here(make_config(data, SHARED, *SHORT), small.path)


def test_a_learned_state_is_what_a_checkpoint_predicts_by(data, tmp_path):
    """Each index that is made is another: without the state of the run's, rows are others'."""
    rows = "embedding.rows=shuffled_rows:Shuffled"
    session = build_session(make_config(data, rows), EncodedDataset.open(data))
    run, _ = train_here(make_config(data, rows, *SHORT), tmp_path / "run")
    batch = next(iter(Loader(EncodedDataset.open(data).split("test"), 50)))
    one, two = (Predictor.open(run.path) for _ in range(2))
    assert one.logits(batch).equal(two.logits(batch))
    fresh, kept = (
        each.row_indices["C1"].state()["row_of"] for each in (session.embeddings, one._model.lookup)
    )
    assert not np.array_equal(fresh, kept)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("embedding.rows=hash", r"`embedding.rows = 'hash'`.*need 'identity', 'hashed', or 'modul"),
        ("embedding.tables.C3.rows=hash", r"`embedding.tables.C3.rows = 'hash'`"),
        ("embedding.rows=hashed", r"no `embedding.rows.capacity`"),
        (
            "embedding.rows={name='hashed', capacity=9, half_life=3}",
            "takes `half_life` with `evict",
        ),
        ("embedding.tables.C3.row=identity", r"unknown key `embedding.tables.C3.row`.*`.*C3.rows`"),
        ("embedding.rows.capacity=3", r"unknown key `embedding.rows.capacity`"),
        ("embedding.rows=own_row_index:Shared", r"no `embedding.rows.capacity`"),
        (
            "embedding.tables.C3.rows={name='own_row_index:Shared', capacity=3, rate=1}",
            r"unknown key `embedding.tables.C3.rows.rate`.*need one of capacity, name",
        ),
        ("embedding.rows=own_row_index:SharedIndex", "is the class SharedIndex; need .*IndexKind"),
    ],
)
def test_what_is_not_there_is_named(setting, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_recipe("synthetic_small", [setting])


def test_a_column_that_the_data_do_not_have_is_named(data):
    config = make_config(data, "embedding.tables.C99.rows=identity")
    with pytest.raises(ConfigError, match=r"\[embedding.tables.C99\]; need a column of the"):
        build_session(config, EncodedDataset.open(data))


def test_what_knows_rows_alone_refuses_the_others(data, tmp_path, monkeypatch, capsys):
    config = make_config(data, SHARED, *SHORT)
    run, _ = train_here(config, tmp_path / "run")
    plain, _ = train_here(make_config(data, *SHORT), tmp_path / "plain")
    export_checkpoint(plain.path, tmp_path / "export")
    whose = r"of table 'C1', whose ids have rows by the index 'shared'; need .*'identity' alone"
    with pytest.raises(ConfigError, match=f"an export {whose}; do: serve or predict"):
        export_checkpoint(run.path, tmp_path / "other")
    with pytest.raises(ConfigError, match=f"an export {whose}"):
        export_delta(run.path, tmp_path / "export", tmp_path / "delta")
    (checkpoint,) = run.checkpoints_path.glob("step-*4")
    with pytest.raises(ConfigError, match=f"a torchrec file {whose}"):
        convert.export_checkpoint(checkpoint, tmp_path / "model.pt", "torchrec")
    dlrm = make_config(data, *SHORT, "model.batch_norm=false", "model.dropout=0.0")
    run_of_others, _ = train_here(dlrm, tmp_path / "dlrm")
    (checkpoint,) = run_of_others.checkpoints_path.glob("step-*4")
    convert.export_checkpoint(checkpoint, tmp_path / "model.pt", "torchrec")
    dataset = EncodedDataset.open(data)
    with pytest.raises(ConfigError, match=f"weights from a file {whose}"):
        convert.import_checkpoint(
            tmp_path / "model.pt",
            RunDirectory(tmp_path / "imported"),
            "torchrec",
            make_config(data, *SHORT, "model.batch_norm=false", SHARED),
            dataset,
        )
    (tmp_path / "recipe.toml").write_text(to_toml(config.model_dump()))
    words = ["plan", "--data", data, "--shards", 2, "--recipe", tmp_path / "recipe.toml"]
    monkeypatch.setattr(sys, "argv", ["pibroch", *map(str, words), "--out", str(tmp_path / "p")])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "a plan from a data set, which counts ids, of table 'C1'" in capsys.readouterr().err


def test_the_command_line_opens_it_with_consent(data, tmp_path):
    """The module lies in the working directory; each command is a process of its own."""
    shutil.copy(ROOT / "examples" / "own_row_index.py", tmp_path / "rows_of_mine.py")
    here = {"cwd": tmp_path, "env": {"PYTHONPATH": ""}}
    setting = SHARED.replace("own_row_index", "rows_of_mine")
    arguments = [word for each in (setting, *SHORT) for word in ("--set", each)]
    trained = run_command("train", "--data", data, "--run-dir", "run", *arguments, **here)
    assert trained.returncode == 0, trained.stderr
    evaluate = ("evaluate", "--checkpoint", "run", "--data", data)
    refused = run_command(*evaluate, **here)
    assert refused.returncode == 2 and "--import rows_of_mine" in refused.stderr
    evaluated = run_command("--import", "rows_of_mine", *evaluate, **here)
    assert evaluated.returncode == 0 and "AUC" in evaluated.stdout, evaluated.stderr
    consent = {"PYTHONPATH": "", IMPORTS: "rows_of_mine"}
    with serving(tmp_path / "run", env=os.environ | consent, cwd=tmp_path) as server:
        answer = server.ask("GET", "/v2/models/run")
        assert answer.status == 200, server.complaints()
