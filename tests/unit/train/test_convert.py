"""Exported models compute the same logits; imported ones are the model that was exported."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from pibroch.collectives import Ranks
from pibroch.data import EncodedDataset
from pibroch.data.loader import batch_of
from pibroch.errors import CheckpointError, ConfigError, MissingDependencyError
from pibroch.score.checkpoint import evaluate_checkpoint
from pibroch.state.checkpoint import restore_weights
from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.state.manifest import read_manifest
from pibroch.train.convert import FORMATS, export_checkpoint, import_checkpoint
from pibroch.train.run_directory import RunDirectory
from pibroch.train.session import build_session
from small_run import make_config, make_dataset, train_here

PLAIN = ["model.batch_norm=false", "model.top=[16, 8]"]
VARIANTS = {
    "plain": PLAIN,
    "batch norm": ["train.steps=30"],
    "averaged": [*PLAIN, "train.average=0.9"],
}


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Finished runs by variant."""
    folder = tmp_path_factory.mktemp("trained")
    changes = {
        name: [*(["train.steps=6"] if "train.steps=30" not in c else []), *c]
        for name, c in VARIANTS.items()
    }
    return {
        name: train_here(make_config(data, *c), folder / name)[0] for name, c in changes.items()
    }


def checkpoint_of(run):
    return CheckpointFolder(run.checkpoints_path, 1).latest()


def some_batch(data):
    return batch_of(EncodedDataset.open(data).split("test"), np.arange(64), None)


def our_logits(run, data):
    """What the checkpoint predicts for a batch."""
    folder = checkpoint_of(run)
    manifest = read_manifest(folder)
    session = build_session(manifest.config, EncodedDataset.open(data))
    restore_weights(folder, manifest, session, Ranks.alone().open_channel())
    with session.predicting() as predict:
        return predict(some_batch(data)).numpy()


def mlp(state, name, x, last_is_hidden):
    numbers = sorted({int(key.split(".")[1]) for key in state if key.startswith(f"{name}.")})
    for number in numbers:
        x = x @ state[f"{name}.{number}.weight"].T + state[f"{name}.{number}.bias"]
        x = x.relu() if last_is_hidden or number != numbers[-1] else x
    return x


def reference_dlrm(state, dense, ids):
    """The forward pass of dlrm_s_pytorch.py up to its sigmoid, restated; ids [B, F]."""
    bottom = mlp(state, "bot_l", dense, True)
    vectors = torch.stack(
        [bottom, *(state[f"emb_l.{f}.weight"][ids[:, f]] for f in range(ids.shape[1]))], 1
    )
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    first = [i for i in range(vectors.shape[1]) for _ in range(i)]
    second = [j for i in range(vectors.shape[1]) for j in range(i)]
    return mlp(state, "top_l", torch.cat([bottom, products[:, first, second]], 1), False).squeeze(1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_reference_dlrm_computes_the_same_logits(trained, data, tmp_path, variant):
    export_checkpoint(checkpoint_of(trained[variant]), tmp_path / "model.pt", "dlrm")
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    batch = some_batch(data)
    logits = reference_dlrm(
        content["state_dict"], batch.dense, batch.values.view(len(batch.keys), -1).T
    )
    np.testing.assert_allclose(
        logits.numpy(), our_logits(trained[variant], data), rtol=1e-5, atol=1e-5
    )
    assert content["iter"] == read_manifest(checkpoint_of(trained[variant])).progress.step


@pytest.mark.parametrize("variant", VARIANTS)
def test_torchrec_s_dlrm_computes_the_same_logits(trained, data, tmp_path, variant):
    from benchmarks.environments import peers_python

    try:
        python = peers_python()
    except MissingDependencyError as error:
        pytest.skip(error.got)
    export_checkpoint(checkpoint_of(trained[variant]), tmp_path / "model.pt", "torchrec")
    batch = some_batch(data)
    rows = EncodedDataset.open(data).num_rows
    model = read_manifest(checkpoint_of(trained[variant])).config.model
    np.savez(
        tmp_path / "batch.npz",
        dense=batch.dense.numpy(),
        ids=batch.values.view(len(batch.keys), -1).T.numpy(),
        names=list(rows),
        rows=list(rows.values()),
        bottom=[*model.bottom, model.dim],
        top=[*model.top, 1],
    )
    script = Path(__file__).with_name("torchrec_forward.py")
    files = ("model.pt", "batch.npz", "logits.npy")
    arguments = [python, script, *(tmp_path / file for file in files)]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    logits = np.load(tmp_path / "logits.npy")
    np.testing.assert_allclose(logits, our_logits(trained[variant], data), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("system", FORMATS)
def test_an_export_comes_back_and_trains_on(trained, data, tmp_path, system, wrapped):
    export_checkpoint(checkpoint_of(trained["plain"]), tmp_path / "model.pt", system)
    if wrapped:
        content = torch.load(tmp_path / "model.pt", weights_only=True)
        state = content.get("state_dict", content)
        torch.save(
            {f"module.{name}": tensor for name, tensor in state.items()}, tmp_path / "model.pt"
        )
    config = make_config(data, *VARIANTS["averaged"], "train.steps=3")
    run = RunDirectory(tmp_path / "run")
    import_checkpoint(tmp_path / "model.pt", run, system, config, EncodedDataset.open(data))
    np.testing.assert_array_equal(our_logits(run, data), our_logits(trained["plain"], data))
    assert evaluate_checkpoint(run.path, EncodedDataset.open(data), "test").metrics.num_samples > 0
    train_here(config, run.path)
    assert CheckpointFolder(run.checkpoints_path, 1).steps()[-1] == 3


@pytest.mark.parametrize("system", FORMATS)
def test_other_models_keep_the_names_of_their_dense_layers(data, tmp_path, system):
    config = make_config(data, "model.name=deepfm", "train.steps=3")
    run, _ = train_here(config, tmp_path / "trained")
    export_checkpoint(checkpoint_of(run), tmp_path / "model.pt", system)
    import_checkpoint(
        tmp_path / "model.pt",
        RunDirectory(tmp_path / "run"),
        system,
        config,
        EncodedDataset.open(data),
    )
    np.testing.assert_array_equal(
        our_logits(RunDirectory(tmp_path / "run"), data), our_logits(run, data)
    )


def refused(data, tmp_path, content, message, error=CheckpointError, system="dlrm", changes=PLAIN):
    path = tmp_path / "model.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(error, match=message):
        config = make_config(data, *changes)
        import_checkpoint(
            path, RunDirectory(tmp_path / "run"), system, config, EncodedDataset.open(data)
        )
    assert not (tmp_path / "run").exists()


def test_what_is_no_state_of_this_model_is_refused(trained, data, tmp_path):
    export_checkpoint(checkpoint_of(trained["plain"]), tmp_path / "good.pt", "dlrm")
    good = torch.load(tmp_path / "good.pt", weights_only=True)["state_dict"]
    refused(data, tmp_path, b"no pickle at all", "model.pt, which is no file of tensors")
    refused(data, tmp_path, torch.nn.Linear(2, 2), "no file of tensors.*do: save model.state_dict")
    refused(data, tmp_path, [1, 2], "a list in")
    refused(
        data, tmp_path, {"a": torch.zeros(2)}, r"parameters named a, \.\.\.; need some named emb_l"
    )
    refused(data, tmp_path, {"emb_l.0.weight": torch.zeros(2, 2)}, "1 tables.*need 26")
    refused(
        data,
        tmp_path,
        good | {"emb_l.3.weight": torch.zeros(2, 2)},
        r"table C\d+' of shape \[2, 2\]",
    )
    refused(data, tmp_path, good | {"top_l.6.weight": torch.zeros(2, 2)}, "no 'top_l.6.bias'")
    refused(data, tmp_path, good, "batch norm", ConfigError, changes=["model.top=[16, 8]"])
    refused(
        data,
        tmp_path,
        good,
        r"top.layers.0.weight' of shape \[16, .*need of shape \[5,",
        changes=[PLAIN[0], "model.top=[5]"],
    )
    refused(data, tmp_path, good, "need some named sparse_arch", system="torchrec")


def test_models_without_an_equal_and_used_names_are_refused(trained, data, tmp_path):
    run, _ = train_here(
        make_config(data, "model.activation=gelu", "train.steps=1"), tmp_path / "gelu"
    )
    with pytest.raises(ConfigError, match="activation 'gelu'"):
        export_checkpoint(checkpoint_of(run), tmp_path / "model.pt", "torchrec")
    (tmp_path / "model.pt").write_text("mine")
    with pytest.raises(ConfigError, match=r"model\.pt, which exists"):
        export_checkpoint(checkpoint_of(trained["plain"]), tmp_path / "model.pt", "dlrm")
    assert (tmp_path / "model.pt").read_text() == "mine"


def test_tables_of_other_names_are_taken_in_their_order(trained, data, tmp_path):
    export_checkpoint(checkpoint_of(trained["plain"]), tmp_path / "model.pt", "torchrec")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    torch.save(
        {name.replace("t_C", "t_cat_"): tensor for name, tensor in state.items()},
        tmp_path / "model.pt",
    )
    run = RunDirectory(tmp_path / "run")
    import_checkpoint(
        tmp_path / "model.pt", run, "torchrec", make_config(data, *PLAIN), EncodedDataset.open(data)
    )
    np.testing.assert_array_equal(our_logits(run, data), our_logits(trained["plain"], data))
    other = EncodedDataset.open(
        make_dataset(tmp_path / "other", num_samples=500, max_table_rows=30)
    )
    with pytest.raises(CheckpointError, match="table C"):
        import_checkpoint(
            tmp_path / "model.pt",
            RunDirectory(tmp_path / "no"),
            "torchrec",
            make_config(data, *PLAIN),
            other,
        )
