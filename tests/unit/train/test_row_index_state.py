"""What an index of one's own knows is saved and loaded with its table.

Checkpoints of runs: test_checkpoint_folder.py and test_timed_checkpoints.py.
"""

from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import pibroch as pb
from pibroch.embedding.row_index import load_state
from pibroch.errors import CheckpointError, ConfigError
from shuffled_rows import Shuffled

ROWS = 30
BATCH = pb.JaggedBatch.from_one_hot(
    torch.zeros(ROWS, 0), ["user"], torch.arange(ROWS)[None], torch.zeros(ROWS)
)


def make(rows=None, optimizer=None):
    tables = [pb.Table("user", ROWS, 4, rows=rows or Shuffled()), pb.Table("other", 5, 4)]
    return pb.Embeddings(tables, optimizer or pb.Adam(lr=0.1))


def step(embeddings):
    out = embeddings(BATCH.with_empty(("other",)))
    (out * torch.arange(out.numel()).view_as(out)).mean().backward()


def looked_up(embeddings):
    with torch.no_grad():
        return embeddings(BATCH.with_empty(("other",)))


def test_a_program_goes_on_to_the_same_bits(tmp_path):
    first = make()
    step(first)
    pb.save(tmp_path, first)
    second = make()
    assert not torch.equal(looked_up(first), looked_up(second))
    pb.load(tmp_path, second)
    alone = make(optimizer=pb.SGD(lr=1.0))
    pb.load(tmp_path, alone, row_state=False)
    assert torch.equal(looked_up(first), looked_up(alone))
    copied = deepcopy(first)
    for each in (first, second, copied):
        step(each)
        assert torch.equal(looked_up(first), looked_up(each))
    ids = np.arange(ROWS)
    index = second.row_indices["user"]
    assert np.array_equal(index.ids_of(index.rows_of(ids)), ids)


def test_torch_s_distributed_checkpoints_have_it(tmp_path):
    first, second = make(), make()
    step(first)
    dcp.save({"tables": first.stateful()}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"tables": second.stateful()}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(looked_up(first), looked_up(second))


def test_other_kinds_settings_and_states_are_refused(tmp_path):
    embeddings = make()
    pb.save(tmp_path, embeddings)
    tables = [pb.Table("user", ROWS, 4), pb.Table("other", 5, 4)]
    with pytest.raises(CheckpointError, match=r"row index \{'name': 'shuffled', 'note': ''\}"):
        pb.load(tmp_path, pb.Embeddings(tables, pb.Adam(lr=0.1)))
    with pytest.raises(CheckpointError, match="'note': 'another'"):
        pb.load(tmp_path, make(Shuffled("another")))
    with pytest.raises(CheckpointError, match=r"none as state 'user.row_of'.*need int64 \[30\]"):
        load_state(embeddings.row_indices, {})


@pytest.mark.parametrize("call", ["state_dict", "full_state_dict"])
def test_tables_alone_would_be_rows_that_no_id_has(call):
    with pytest.raises(ConfigError, match="'user', whose row index has a state"):
        getattr(make(), call)()


def test_weights_from_outside_come_by_id():
    embeddings = make()
    weights = np.random.default_rng(1).normal(size=(ROWS, 4)).astype(np.float32)
    embeddings.load_weights("user", weights)
    assert np.array_equal(looked_up(embeddings)[:, 0].numpy(), weights)
    embeddings.load_weights("user", weights[:2], ids=[7, 3])
    assert np.array_equal(looked_up(embeddings)[[7, 3], 0].numpy(), weights[:2])
    with pytest.raises(pb.errors.RowIdError, match="id 30 in row 1 of the weights"):
        embeddings.load_weights("user", weights[:2], ids=[7, 30])
