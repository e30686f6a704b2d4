"""Checkpoints of a program whose checksums fit what a stranger changed.

Each is refused in words, or loads.
"""

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import nn

import pibroch as pb
from pibroch.errors import CheckpointError
from pibroch.state.dense import set_random_state
from pibroch.untrusted import checksum

TABLES = [pb.Table("a", 9, 4)]


def program():
    embeddings = pb.Embeddings(TABLES, pb.Adagrad(lr=0.1))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return embeddings, {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    embeddings, parts = program()
    batch = pb.JaggedBatch.from_one_hot(
        torch.zeros(9, 0), ("a",), torch.arange(9)[None], torch.zeros(9)
    )
    parts["model"](embeddings(batch)[:, 0]).sum().backward()
    parts["optimizer"].step()
    folder = tmp_path_factory.mktemp("program")
    return pb.save(folder, embeddings, **parts, extra={"x": (1, float("inf"))})


def rewritten(saved, folder, change=lambda content: None, file=None, tensors=lambda result: None):
    """A copy with another manifest, or other tensors in a file, whose checksums fit."""
    shutil.copytree(saved, folder)
    content = json.loads((folder / "manifest.json").read_text())
    if file is not None:
        result = load_file(folder / file)
        tensors(result)
        save_file(result, folder / file)
        data = (folder / file).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        content["files"][file] = {"size_bytes": len(data), "sha256": digest}
    change(content)
    del content["sha256"]
    content["sha256"] = checksum(content)
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


def part(content, name):
    return content["program"]["parts"][name]


def set_(path, value):
    def change(content):
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


STATE = ("program", "parts")
TABLE = ("tables", "a")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_(("tables",), [3]), "`tables`"),
        (set_((*TABLE, "num_rows"), 10**12), "files as large as its 10+ rows"),
        (set_((*TABLE, "dim"), -4), "`tables.a`"),
        (set_((*TABLE, "parts", 0, "columns"), [0, 99]), "columns within 0 to 4"),
        (set_((*TABLE, "parts", 0, "rows"), [0, 9, 0]), "rows within 0 to 9"),
        (
            set_((*TABLE, "parts", 0, "file"), "../../../../etc/passwd"),
            "in files of the checkpoint",
        ),
        (set_(("files", "../../../../etc/passwd"), {"size_bytes": 1, "sha256": ""}), "inside the"),
        (set_(("program", "rates"), {}), "a learning rate of each table"),
        (set_(("program", "rates", "a", "lr"), "high"), "lr = 'high' of table 'a'"),
        (set_(("progress", "step"), -1), "`progress.step` is -1"),
        (set_(("progress", "loader"), {"epoch": "x", "sample": 1}), "the position in"),
        (set_((*STATE, "optimizer"), {"kind": "Adam"}), "it has no `state`"),
        (set_((*STATE, "optimizer", "groups", 0, "lr"), "much"), "lr = 'much' in group 0"),
        (set_((*STATE, "optimizer", "groups", 0, "params"), 7), "parameters of group 0"),
        (set_((*STATE, "optimizer", "state", "weight"), {"exp_avg": 3}), "exp_avg 3 of 'weight'"),
        (set_((*STATE, "optimizer", "state", "weight"), {"exp_avg": {"$tensor": []}}), "no tensor"),
        (set_((*STATE, "scheduler", "state"), {"step": 3}), "'step' in scheduler, a method"),
        (set_((*STATE, "scheduler"), None), "part 'scheduler'"),
        (set_((*STATE, "extra", "state"), {"$float": "one"}), "'$float' in the checkpoint"),
        (set_((*STATE, "extra", "state"), {"$items": [1]}), "'$items' in the checkpoint"),
        (set_((*STATE, "extra", "state"), {"$items": [[[], 1]]}), "'$items' in the checkpoint"),
    ],
)
def test_manifests(saved, tmp_path, change, words):
    folder = rewritten(saved, tmp_path / "c", change)
    embeddings, parts = program()
    with pytest.raises(CheckpointError, match=words.replace("$", r"\$")):
        pb.load(folder, embeddings, **parts)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("tables/a.safetensors", lambda t: t.update(weight=t["weight"][:5]), "9 rows"),
        ("tables/a.safetensors", lambda t: t.update(weight=t["weight"] > 0), "bool"),
        ("dense.safetensors", lambda t: t.pop("bias"), "does not fit"),
        (
            "dense_optimizer.safetensors",
            lambda t: t.update({"weight/exp_avg": np.zeros((2, 9), np.float32)}),
            "exp_avg",
        ),
        ("random.safetensors", lambda t: t.update(torch=t["torch"][:8]), "state of torch's"),
        ("random.safetensors", lambda t: t["torch"].__setitem__(slice(8, 12), 0), "no generator"),
    ],
)
def test_tensors(saved, tmp_path, file, change, words):
    folder = rewritten(saved, tmp_path / "c", file=file, tensors=change)
    embeddings, parts = program()
    with pytest.raises(CheckpointError, match=words):
        pb.load(folder, embeddings, **parts)


def test_random_states_are_those_of_a_generator(saved, tmp_path):
    before = torch.get_rng_state()
    try:
        for draws in (0, 1, 622, 623, 624, 625):
            torch.manual_seed(draws)
            torch.rand(draws)
            state = torch.get_rng_state()
            set_random_state({"torch": state}, "torch")
            assert torch.equal(torch.get_rng_state(), state)
        # a position so far on that the next numbers would be read behind the last
        state = state.numpy().copy()
        state[8:12] = [112, 2, 0, 0]
        state[16:24] = [112, 2, 0, 0, 0, 0, 0, 0]
        with pytest.raises(CheckpointError, match="no generator"):
            set_random_state({"torch": torch.from_numpy(state)}, "torch")
    finally:
        torch.set_rng_state(before)


def test_what_nobody_changed_loads(saved, tmp_path):
    embeddings, parts = program()
    assert pb.load(rewritten(saved, tmp_path / "c"), embeddings, **parts).extra == {
        "x": (1, float("inf"))
    }
