"""Scaled losses: rows move as without a scale, and not at all where gradients are not finite."""

import pytest
import torch

import pibroch as pb
from clicked_model import Clicks, ids, ones


def steps(scaler, num_steps=3, accumulate=1, autocast=False):
    """Train with torch's documented loop; returns the model."""
    model = Clicks(pb.Adagrad(lr=0.5), seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(ones(2), ids(step + part, 2)).square().mean() / accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return model


def state_of(model):
    return [torch.from_numpy(model.table.shard.records.copy()), *model.net.state_dict().values()]


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, torch.cuda.amp.GradScaler])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"autocast": True}])
@pytest.mark.filterwarnings("ignore:.*GradScaler:FutureWarning", "ignore:.*CUDA:UserWarning")
def test_the_same_bits_with_a_scale_as_without(kind, options):
    """The scale is a power of two, so that nothing is rounded."""
    scaler = kind("cpu", growth_interval=2) if kind is torch.amp.GradScaler else kind()
    want = steps(None, **options)
    got = steps(scaler, **options)
    assert all(map(torch.equal, state_of(got), state_of(want)))
    assert got.table.step == want.table.step


def test_a_scaler_that_is_off_and_losses_that_it_did_not_scale():
    assert all(
        map(
            torch.equal,
            state_of(steps(torch.amp.GradScaler("cpu", enabled=False))),
            state_of(steps(None)),
        )
    )
    model = Clicks()
    scaler = torch.amp.GradScaler("cpu")
    before = model.rows
    scaler.scale(model(ones(2), ids(1, 1)).sum())  # and no backward
    model(ones(2), ids(1, 2)).sum().backward()
    assert 0 < (model.rows - before).abs().max() < 10


def test_losses_in_lists_and_two_scalers():
    model = Clicks(seed=1)
    twin = Clicks(seed=1)
    small, large = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (2.0, 4096.0))
    for scaler in (small, large):
        out = model(ones(2), ids(1, 2))
        want = twin(ones(2), ids(1, 2))
        first, second = scaler.scale([out.sum(), out.square().sum()])
        (first + second).backward()
        (want.sum() + want.square().sum()).backward()
    assert torch.equal(model.rows, twin.rows)


def test_overflow_moves_no_row_counts_no_step_and_lowers_the_scale():
    model = Clicks(pb.Adam(lr=0.5, weight_decay=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
    before = model.table.shard.records.copy()
    for _ in range(2):
        scaler.scale(model(ones(2), ids(1, 2)).sum() * 1e3).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert (model.table.shard.records == before).all() and model.table.step == 0
    assert scaler.get_scale() == 2.0**125
    for _ in range(60):
        scaler.scale(model(ones(2), ids(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert model.table.step > 50 and (model.table.shard.records != before).any()


@pytest.mark.parametrize("where", [0, 1, None])
def test_gradients_of_rows_alone_that_are_not_finite_are_heard_of(where):
    """In either of two passes before an update, or of a model of which only rows are trained."""
    model = Clicks()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = (
        model.table.fused_optimizer
        if where is None
        else torch.optim.SGD(model.net.parameters(), lr=0.1)
    )
    for part in range(2):
        rows = model.table(ids(1, 2))
        if part == (where or 0):
            rows.register_hook(lambda gradient: gradient * torch.inf)
        scaler.scale(model.net(torch.cat([ones(2), rows[:, 0]], 1)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15 and model.table.step == 1
    scaler.scale(model(ones(2), ids(1, 2)).sum()).backward()
    scaler.unscale_(model.table.fused_optimizer)  # as of any optimizer
    scaler.step(model.table.fused_optimizer)
    scaler.step(optimizer) if where is not None else None
    scaler.update()
    assert scaler.get_scale() == 2.0**15 and model.table.step == 2


class Constant:
    """A scaler of one's own."""

    def __init__(self, scale):
        self.scale = scale
        self.num_unscaled = 0

    def get_scale(self):
        return self.scale

    def unscale_(self, optimizer):
        self.num_unscaled += 1


def test_a_scaler_of_ones_own_is_said():
    model = Clicks(seed=1)
    twin = Clicks(seed=1)
    scaler = Constant(256.0)
    assert model.table.scaled_by(scaler) is model.table
    (model(ones(2), ids(1, 2)).sum() * 256).backward()
    twin(ones(2), ids(1, 2)).sum().backward()
    assert torch.equal(model.rows, twin.rows) and not scaler.num_unscaled
    (model(ones(2), ids(1, 2)).sum() * torch.inf).backward()
    assert torch.equal(model.rows, twin.rows) and scaler.num_unscaled == 1
    model.table.scaled_by(None)
    (model(ones(2), ids(1, 2)).sum()).backward()
    twin(ones(2), ids(1, 2)).sum().backward()
    assert torch.equal(model.rows, twin.rows)
