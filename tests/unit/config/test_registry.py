"""What users add: in one file each, by an entry point or as ``module:Class``, all the way."""

import importlib
import json
import shutil
import sys

import pytest
import torch

from doc_pages import ROOT
from pibroch import untrusted
from pibroch.config import load_recipe
from pibroch.config.exchange import EXCHANGES
from pibroch.config.initializer import INITIALIZERS
from pibroch.config.loss import LOSSES
from pibroch.config.model import MODELS, ModelConfig
from pibroch.config.optimizer import DENSE_OPTIMIZERS, SPARSE_OPTIMIZERS
from pibroch.config.recipes import change_config
from pibroch.config.registry import IMPORTS
from pibroch.data import JaggedBatch
from pibroch.errors import ConfigError
from pibroch.serve.export import export_checkpoint
from pibroch.serve.predictor import Predictor
from pibroch.state.export_format import EXPORT
from pibroch.train.data_source import open_dataset
from pibroch.train.session import build_session
from small_run import make_config, make_dataset, run_command, train_here

FOLDERS = (ROOT / "tests" / "own_components", ROOT / "examples")
REGISTRIES = (EXCHANGES, INITIALIZERS, LOSSES, MODELS, DENSE_OPTIMIZERS, SPARSE_OPTIMIZERS)
OWN = {
    "model": ("own_model:Clicks", {"dim": 4, "hidden": 8}),
    "loss": ("own_model:Focal", {"gamma": 1.0}),
    "optimizer": ("own_dense_optimizer:SignDescent", {"lr": 0.001, "shrink": 0.5}),
    "embedding.optimizer": ("own_optimizer:Lion", {"lr": 0.01, "betas": [0.8, 0.9]}),
    "embedding.init": ("own_initializer:Constant", {"value": 0.25}),
    "embedding.exchange": ("own_exchange:SPEC", {}),
}
GROUPS = {
    "model": "models",
    "loss": "losses",
    "optimizer": "optimizers",
    "embedding.optimizer": "sparse_optimizers",
    "embedding.init": "initializers",
    "embedding.exchange": "exchanges",
}
PREFIXES = ("own_", "wrong_components")
STEPS = ("train.epochs=none", "train.steps=4", "train.checkpoint_every=2")


@pytest.fixture(autouse=True)
def own(monkeypatch, tmp_path):
    """Modules of one's own are on the path; nothing is registered, imported or allowed yet."""
    for name in [name for name in sys.modules if name.startswith(PREFIXES)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv(IMPORTS, "")
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_registered", {})
        monkeypatch.delitem(vars(registry), "_installed", raising=False)
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder)
    yield
    for name in [name for name in sys.modules if name.startswith(PREFIXES)]:
        del sys.modules[name]
    for registry in REGISTRIES:
        vars(registry).pop("_installed", None)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("own") / "data", num_samples=1000)


def settings(names):
    """Overrides that choose all six by these names."""
    return [f"{key}={_table({'name': names[key], **values})}" for key, (_, values) in OWN.items()]


def _table(values):
    return "{" + ", ".join(f"{key}={json.dumps(value)}" for key, value in values.items()) + "}"


def install(folder, monkeypatch):
    """As if a distribution had been installed whose entry points name all six."""
    info = folder / "own-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1\n")
    lines = [
        f"[pibroch.{GROUPS[key]}]\nmine_{i} = {path}\n"
        for i, (key, (path, _)) in enumerate(OWN.items())
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(folder)
    return {key: "ask_first" if "exchange" in key else f"mine_{i}" for i, key in enumerate(OWN)}


@pytest.mark.parametrize("by", ["path", "entry point"])
def test_what_is_one_s_own_trains_goes_on_and_is_served(by, data, tmp_path, monkeypatch):
    names = {key: path for key, (path, _) in OWN.items()}
    if by == "entry point":
        names = install(tmp_path / "site", monkeypatch)
    config = make_config(data, *settings(names), *STEPS)
    assert [config.model.hidden, config.loss.gamma, config.embedding.init.value] == [8, 1.0, 0.25]
    run, result = train_here(config, tmp_path / "run")
    assert result.summary.steps == 4 and result.summary.exchange == names["embedding.exchange"]
    begun, _ = train_here(change_config(config, ["train.steps=2"]), tmp_path / "again")
    assert begun.config() == change_config(config, ["train.steps=2"])
    _, resumed = train_here(config, tmp_path / "again")
    assert resumed.summary.auc == result.summary.auc
    last = {
        folder.name: (folder / "dense.safetensors").read_bytes()
        for path in (run, begun)
        for folder in [path.checkpoints_path / "step-00000004"]
    }
    assert len(last) == 1
    exported = tmp_path / "export"
    export_checkpoint(run.path, exported)
    samples = Predictor.open(run.path)
    assert type(samples._model.dense).__name__ == "Clicks"
    assert Predictor.open(exported)._model.dense.net[0].out_features == 8


def test_each_of_them_is_what_trains(data, tmp_path):
    """The first loss is the focal one of constant rows; a step moves by the sign alone."""
    config = make_config(data, *settings({key: path for key, (path, _) in OWN.items()}), *STEPS)
    session = build_session(config, open_dataset(config.data))
    assert session.embeddings.shard.records[:, :4].min() == 0.25
    assert type(session.embeddings.exchange).__name__ == "AskFirst"
    assert type(session.embeddings.optimizers["C1"]).__name__ == "Lion"
    assert session.embeddings.optimizers["C1"].betas == (0.8, 0.9)
    logits = torch.tensor([0.3, -0.2])
    labels = torch.tensor([1.0, 0.0])
    ids = torch.zeros(1, 2, dtype=torch.int64)
    batch = JaggedBatch.from_one_hot(torch.empty(2, 0), ("C1",), ids, labels)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    expected = ((1 - torch.exp(-loss)) * loss).mean()
    torch.testing.assert_close(session.criterion(logits, batch), expected)
    assert type(session.optimizer).__name__ == "SignDescent"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "model.name=no_such_module:X",
            "got model 'no_such_module:X'.*ModuleNotFoundError.*do: try",
        ),
        ("model.name=broken:X", "cannot be imported: ZeroDivisionError"),
        ("model.name=wrong_components:Missing", "wrong_components has no 'Missing'; need a class"),
        ("model.name=wrong_components:NoModel", "is the class NoModel; need .*models.base.Model"),
        ("model.name=wrong_components:NUMBER", "is of type int; need a class that derives from"),
        ("model.name=wrong_components:NoSection", "`section` is absent; need .*do: write"),
        ("model.name=own_model:Focal", "is the class Focal; need a class .*models.base.Model"),
        ("loss.name=own_model:Clicks", "is the class Clicks; need a class .*models.losses.Loss"),
        ("embedding.init.name=own_optimizer:Lion", "is the class Lion; need .*Initializer"),
        ("loss.name=bec", r"`loss.name = 'bec'`.*need 'bce', .*, or 'module:Class'"),
        ("loss.gama=2", r"unknown key `loss.gama`.*need one of name"),
    ],
)
def test_what_cannot_be_named_is_refused(setting, message, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_recipe("synthetic_small", [setting])


def test_an_unknown_setting_of_one_s_own_model_is_named():
    chosen = ["model.name=own_model:Clicks", "model.hiden=3"]
    with pytest.raises(ConfigError, match=r"unknown key `model.hiden`.*mean `model.hidden`"):
        load_recipe("synthetic_small", chosen)
    assert load_recipe("synthetic_small", chosen[:1]).model.dim == 16, "what both have stays"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_model:Clicks", "named by a file; its module is not imported; need your consent"),
        ("os:system", "os:system', which is of type builtin_function_or_method"),
        ("pibroch:Embeddings", "pibroch has no 'Embeddings'"),
        (":", "not imported"),
    ],
)
def test_a_file_imports_nothing(name, message):
    content = {"name": name, "dim": 4}
    with pytest.raises(ConfigError, match=message):
        untrusted.checked(ModelConfig, content, "a file", EXPORT)
    assert "own_model" not in sys.modules


def test_a_file_may_name_what_the_user_imported():
    own_model = importlib.import_module("own_model")

    read = untrusted.checked(ModelConfig, {"name": "own_model:Clicks"}, "a file", EXPORT)
    assert type(read) is own_model.ClicksConfig


def test_the_command_line_trains_it_and_opens_it_with_consent(data, tmp_path):
    """The module lies in the working directory; each command is a process of its own."""
    shutil.copy(ROOT / "examples" / "own_model.py", tmp_path / "clicks_of_mine.py")
    here = {"cwd": tmp_path, "env": {"PYTHONPATH": ""}}
    chosen = ["model.name=clicks_of_mine:Clicks", "loss.name=clicks_of_mine:Focal"]
    arguments = [word for each in (*chosen, *STEPS) for word in ("--set", each)]
    trained = run_command("train", "--data", data, "--run-dir", "run", *arguments, **here)
    assert trained.returncode == 0, trained.stderr
    evaluate = ("evaluate", "--checkpoint", "run", "--data", data)
    refused = run_command(*evaluate, **here)
    assert refused.returncode == 2 and "--import clicks_of_mine" in refused.stderr
    evaluated = run_command("--import", "clicks_of_mine", *evaluate, **here)
    assert evaluated.returncode == 0 and "AUC" in evaluated.stdout, evaluated.stderr
