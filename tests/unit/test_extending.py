"""The examples of the pages on extending run, and do what the pages say.

That of an exchange is in tests/unit/exchange.
"""

import importlib.util
import os
import runpy
import sys

import numpy as np
import pytest
import torch

import pibroch as pb
from doc_pages import ROOT
from forked import Program
from pibroch.errors import DataError
from pibroch.ports import free_port

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def lion():
    """The example's names, of a module that can be found.

    Numba keeps compiled kernels on disk with the name of theirs.
    """
    spec = importlib.util.spec_from_file_location("own_optimizer", EXAMPLES / "own_optimizer.py")
    sys.modules["own_optimizer"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield vars(module)
    del sys.modules["own_optimizer"]


def test_the_optimizer_s_kernel_is_its_formula(lion):
    """Duplicates in a batch, three steps, decoupled decay: against plain NumPy."""
    optimizer = lion["Lion"](lr=0.1, weight_decay=0.2, decoupled=True, betas=(0.8, 0.9))
    embeddings = pb.Embeddings([pb.Table("item", 6, 5)], optimizer)
    names = [f"embedding_bags.item.{name}" for name in ("weight", "exp_avg")]
    weights, momentum = (
        embeddings.full_state_dict(row_state=True)[name].double().numpy().copy() for name in names
    )
    for ids in ([0, 1, 1, 4], [4, 4, 0, 0], [1, 2, 3, 4]):
        batch = pb.JaggedBatch.from_one_hot(
            torch.zeros(4, 0), ["item"], torch.tensor([ids]), torch.zeros(4)
        )
        factors = torch.randn(4, 5)
        (embeddings(batch)[:, 0] * factors).sum().backward()
        for row in set(ids):
            gradient = factors.numpy()[[i for i, each in enumerate(ids) if each == row]].sum(0)
            weights[row] *= 1 - 0.1 * 0.2
            weights[row] -= 0.1 * np.sign(0.8 * momentum[row] + 0.2 * gradient)
            momentum[row] = 0.9 * momentum[row] + 0.1 * gradient
    state = embeddings.full_state_dict(row_state=True)
    for name, meant in zip(names, (weights, momentum), strict=True):
        np.testing.assert_allclose(state[name].numpy(), meant, atol=1e-5)


def test_the_optimizer_learns_beside_another_one(lion, capsys):
    lion["main"]()
    output = capsys.readouterr().out
    assert float(output.split(" to ")[1].split(";")[0]) < 0.3 and "item.exp_avg" in output


def test_the_row_index_lets_ids_share_rows(capsys):
    runpy.run_path(str(EXAMPLES / "own_row_index.py"))["main"]()
    assert capsys.readouterr().out == "3 and 7 share a row: True; 3 and 2**40: False\n"


def test_the_data_source_becomes_a_dataset(tmp_path, capsys):
    example = runpy.run_path(str(EXAMPLES / "own_data_source.py"))
    example["main"](tmp_path)
    assert "4000 samples to train on; a batch of 256 has shop, item" in capsys.readouterr().out
    source = example["JsonLines"](tmp_path / "clicks.jsonl", ("clicked", "shop"))
    whole = [piece for piece in source.pieces(example["Place"](), 1 << 30)]
    pieces = list(source.pieces(example["Place"](), 1000))
    assert (
        len(whole) == 1
        and len(pieces) > 100
        and b"".join(piece.text for piece in pieces) == whole[0].text
    )
    again = list(source.pieces(pieces[6].end, 1000))
    assert [piece.text for piece in again] == [piece.text for piece in pieces[7:]]


def test_the_data_source_names_a_line_that_is_not_json(tmp_path):
    example = runpy.run_path(str(EXAMPLES / "own_data_source.py"))
    path = tmp_path / "clicks.jsonl"
    path.write_text('{"clicked": 1}\n{"clicked": \n')
    with pytest.raises(DataError, match=r"clicks.jsonl, line 2: .*an object in JSON"):
        list(example["JsonLines"](path, ("clicked",)).pieces(example["Place"](), 1000))


def test_the_transport_carries_a_channel():
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    programs = [
        Program(EXAMPLES / "own_transport.py", env={**os.environ, **place, "RANK": str(r)})
        for r in range(2)
    ]
    with programs[0], programs[1]:
        ran = [program.end() for program in programs]
    assert [each.returncode for each in ran] == [0, 0], ran
    assert [each.stdout for each in ran] == [
        f"rank {r} of [0, 1]: sum [0.0, 3.0, 6.0, 9.0]\n" for r in range(2)
    ]
