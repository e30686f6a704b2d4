"""What is done to a model around tables, through its parameters.

Freezing, types, devices, shared memory.
"""

import pytest
import torch
from torch import nn

import pibroch as pb
from clicked_model import Clicks, ids, ones
from pibroch.errors import ConfigError

FREEZE = {
    "the model": lambda model: model.requires_grad_(False),
    "each parameter": lambda model: [p.requires_grad_(False) for p in model.parameters()],
    "a module around": lambda model: nn.ModuleList([nn.Sequential(model)]).requires_grad_(False),
    "the tables": lambda model: model.table.requires_grad_(False),
}


@pytest.mark.parametrize("how", FREEZE)
def test_frozen_rows_stay_and_inputs_have_gradients(how):
    model = Clicks(pb.Adagrad(lr=0.5))
    x = ones(2, requires_grad=True)
    before = model.table.shard.records.copy()
    FREEZE[how](model)
    for batch in model.table.feed([ids(1, 2)] * 2):
        model(x, batch).sum().backward()
    assert x.grad.abs().sum() > 0
    assert (model.table.shard.records == before).all() and model.table.step == 0
    model.requires_grad_(True)
    model(x, ids(1, 2)).sum().backward()
    assert (model.table.shard.records != before).any() and model.table.step == 1


def test_frozen_dense_layers_leave_rows_learning():
    model = Clicks()
    model.net.requires_grad_(False)
    before = model.rows
    model(ones(2), ids(1, 2)).sum().backward()
    assert not torch.equal(model.rows, before)


def test_frozen_between_forward_and_backward_as_a_parameter_is():
    model = Clicks()
    before = model.rows
    loss = model(ones(2), ids(1, 2)).sum()
    model.requires_grad_(False)
    loss.backward()
    assert torch.equal(model.rows, before) and model.table.step == 0
    assert model.net[0].weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_type_for_the_whole_model_is_that_of_embeddings_and_rows_stay(dtype):
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "clicks": Clicks(), "last": nn.Linear(2, 2)})
    before = model["clicks"].rows
    assert model.to(dtype) is model
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model["clicks"].table(ids(1)).dtype == dtype
    model["clicks"](ones(2, dtype=dtype), ids(1, 2)).sum().backward()
    after = model["clicks"].rows
    assert after.dtype == torch.float32
    assert (after[1:3] != before[1:3]).any() and torch.equal(after[3:], before[3:])
    assert model.float()["clicks"].table(ids(1)).dtype == torch.float32


def test_types_of_jagged_and_weighted_embeddings_too():
    table = pb.Table("s", 6, 4, pooling="none")
    embeddings = pb.Embeddings([pb.Table("a", 6, 4), table], pb.SGD(lr=1.0)).bfloat16()
    weights = torch.ones(2, requires_grad=True)
    keys = ["a", "s"]
    batch = pb.JaggedBatch(
        torch.zeros(1, 0),
        tuple(keys),
        torch.tensor([1, 2]),
        torch.tensor([0, 1, 2]),
        torch.zeros(1),
    )
    out = embeddings(batch)
    assert out["a"].dtype == out["s"].values.dtype == torch.bfloat16
    only = pb.Embeddings([pb.Table("a", 6, 4)], pb.SGD(lr=1.0)).bfloat16()
    learned = pb.JaggedBatch(
        torch.zeros(1, 0),
        ("a",),
        torch.tensor([1, 2]),
        torch.tensor([0, 2]),
        torch.zeros(1),
        weights,
    )
    given = only(learned)
    given.float().sum().backward()
    assert given.dtype == torch.bfloat16 and weights.grad.abs().sum() > 0


def test_devices_and_what_is_refused_leaves_nothing_half_changed():
    model = Clicks()
    assert model.to("cpu") is model
    assert {p.device.type for p in model.to("meta").parameters()} == {"meta"}
    assert model.table(ids(1)).device.type == "cpu", "rows, and so embeddings, stay"
    with pytest.raises(ConfigError, match="share_memory"):
        Clicks().share_memory()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_a_model_goes_to_a_device_and_comes_back():
    model = Clicks().to("cuda")
    assert model.table(ids(1)).device.type == "cuda"
    model(ones(2).cuda(), ids(1, 2)).sum().backward()
    assert model.table.step == 1
    assert model.cpu().table(ids(1)).device.type == "cpu"


def test_the_parameter_without_elements_is_in_no_state_and_moves_no_optimizer():
    model = Clicks()
    assert [*model.state_dict()] == [
        "table.embedding_bags.a.weight",
        *(f"net.{name}" for name in model.net.state_dict()),
    ]
    model.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(ones(2), ids(1, 2)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=torch.inf)
    optimizer.step()
    assert model.table.anchor not in optimizer.state
    assert sum(p.numel() for p in model.table.parameters()) == 0


def test_an_optimizer_that_was_saved_without_it_loads(tmp_path):
    """As by the versions that had none."""
    model = Clicks()
    model(ones(2), ids(1, 2)).sum().backward()
    dense = torch.optim.Adam(model.net.parameters(), lr=0.1)
    dense.step()
    saved = pb.save(tmp_path, model.table, model=model, optimizer=dense)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.2)
    pb.load(saved, model.table, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.state) == len(dense.state)
