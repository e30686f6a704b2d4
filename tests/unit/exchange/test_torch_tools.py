"""The table of docs/torch-tools.md.

Every row is here, or named from here to the test that shows it.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import nn

import pibroch as pb
from clicked_model import Clicks, ids, ones
from pibroch.errors import TrainingError

ROOT = Path(__file__).parents[3]
SHOWN = {
    "`torch.autocast`": "test_autocast",
    "`torch.amp.GradScaler`": "test_the_same_bits_with_a_scale_as_without",
    "another scaler": "test_a_scaler_of_ones_own_is_said",
    "gradients that are not finite": "test_a_step_that_overflows_on_one_rank_is_left_out_on_all",
    "`model.half()`, `.bfloat16()`, `.double()`": (
        "test_a_type_for_the_whole_model_is_that_of_embeddings_and_rows_stay"
    ),
    "`model.to(device)`": "test_devices_and_what_is_refused_leaves_nothing_half_changed",
    "`model.share_memory()`": "test_devices_and_what_is_refused_leaves_nothing_half_changed",
    "`model.requires_grad_(False)`": "test_frozen_rows_stay_and_inputs_have_gradients",
    "`model.apply(init)`": "test_apply_leaves_rows",
    "`model.zero_grad()`": "test_zero_grad_leaves_rows",
    "`state_dict()`": "test_the_parameter_without_elements_is_in_no_state_and_moves_no_optimizer",
    "`copy.deepcopy`, `pickle`, `torch.save(model)`": (
        "test_a_copy_goes_on_as_the_original_would_and_neither_moves_the_other"
    ),
    "the same, tables of several ranks": "test_copies_are_refused_in_words",
    "`AveragedModel` (EMA, SWA)": "test_what_the_warning_says_to_do_averages_both",
    "`torch.compile`": "test_compiled",
    "`torch.compile(fullgraph=True)`": "test_compiled_as_one_graph_is_refused",
    "`checkpoint(..., use_reentrant=False)`": (
        "test_gradients_and_rows_have_the_bits_of_a_pass_without"
    ),
    "`checkpoint(..., use_reentrant=True)`": (
        "test_reentrant_checkpointing_is_refused_before_a_row_has_moved"
    ),
    "`save_on_cpu`, saved-tensor hooks": "test_gradients_and_rows_have_the_bits_of_a_pass_without",
    "`torch.func.functional_call`": "test_functional_call",
    "`torch.func.grad`, `vmap`": "test_transforms_are_refused",
    "hooks of modules and tensors": "test_hooks",
    "lookups inside backward hooks": (
        "test_a_lookup_without_gradients_in_a_pass_that_moved_rows_is_refused"
    ),
    "`torch.autograd.grad`, `backward(inputs=...)`": "test_gradients_that_were_not_asked_of_rows",
    "`retain_graph=True`": "test_a_second_backward_is_refused",
    "`create_graph=True`": "test_double_backward",
    "`detect_anomaly`, `inference_mode`": "test_anomaly_and_inference_mode",
    "`optimizer.step(closure)`": "test_a_closure",
    "LBFGS, SAM": "test_closures_that_are_evaluated_again",
    "schedulers of learning rates": "test_schedulers",
    "gradient accumulation": "test_accumulation",
    "gradient clipping": "test_clipping",
    "`DistributedDataParallel`": "test_ddp_and_fsdp_around_a_model_with_tables",
    "`fully_shard` (FSDP2), `FullyShardedDataParallel`": (
        "test_ddp_and_fsdp_around_a_model_with_tables"
    ),
    "`torch.nn.DataParallel`": "test_replicas_of_data_parallel_threads_are_refused",
    "threads": "test_threads",
    "Lightning": "test_lightning_trains_to_the_bits_of_a_plain_loop",
    "Accelerate": "test_accelerate_trains_to_the_bits_of_a_plain_loop",
}
"""Row of the table: its test."""


def test_every_row_has_its_test():
    page = (ROOT / "docs" / "torch-tools.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (?:works|refused|rows stay)\b", page, re.MULTILINE)
    assert rows == [*SHOWN]
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name in SHOWN.values() if f"def {name}(" not in tests]


def losses(model, num_steps=3, call=None, x=None):
    """Train; returns the losses."""
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
    of_steps = []
    for step in range(num_steps):
        optimizer.zero_grad()
        forward = model if call is None else call
        loss = forward(ones(2) if x is None else x, ids(step, 2)).square().mean()
        loss.backward()
        optimizer.step()
        of_steps.append(loss.item())
    return of_steps


def test_autocast():
    model = Clicks(seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        rows = model.table(ids(1, 2))
        out = model(ones(2), ids(1, 2))
    assert rows.dtype == torch.float32 and out.dtype == torch.bfloat16
    before = model.rows
    out.float().sum().backward()
    assert model.table.step == 1 and not torch.equal(model.rows, before)


def test_apply_leaves_rows():
    model = Clicks()
    before = model.rows
    seen = []

    def init(module):
        seen.append(type(module))
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    model.apply(init)
    assert pb.Embeddings in seen and torch.equal(model.rows, before)


def test_zero_grad_leaves_rows():
    model = Clicks(seed=1)
    twin = Clicks(seed=1)
    for each in (model, twin):
        each(ones(2), ids(1, 2)).sum().backward()
        each.zero_grad() if each is model else None
        each.table.fused_optimizer.zero_grad()
    assert torch.equal(model.rows, twin.rows)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("whole", [False, True])
def test_compiled(whole):
    """What is compiled around a lookup; a lookup itself runs as it is."""
    torch.compiler.reset()
    model = Clicks(seed=1)
    twin = Clicks(seed=1)
    compiled = torch.compile(model, backend="eager")
    if not whole:
        model.net.compile(backend="eager")
        compiled = model
    assert losses(model, call=compiled) == losses(twin)
    assert torch.equal(model.rows, twin.rows) and model.table.step == 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_as_one_graph_is_refused():
    torch.compiler.reset()
    model = Clicks(seed=1)
    twin = Clicks(seed=1)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Embeddings\.forward"):
        whole(ones(2), ids(1, 2))
    rest = torch.compile(
        lambda x, rows: model.net(torch.cat([x, rows[:, 0]], 1)), backend="eager", fullgraph=True
    )
    rest(ones(2), model.table(ids(1, 2))).sum().backward()
    twin(ones(2), ids(1, 2)).sum().backward()
    assert torch.equal(model.rows, twin.rows)


def test_functional_call():
    model = Clicks(seed=1)
    twin = Clicks(seed=1)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    parameters = {name: p.requires_grad_() for name, p in parameters.items()}
    torch.func.functional_call(model, parameters, (ones(2), ids(1, 2))).sum().backward()
    twin(ones(2), ids(1, 2)).sum().backward()
    assert torch.equal(model.rows, twin.rows) and model.table.step == 1
    name = "net.0.weight"
    assert torch.equal(parameters[name].grad, twin.get_parameter(name).grad)


def test_transforms_are_refused():
    model = Clicks(seed=1)
    batch = ids(1, 2)
    parameters = dict(model.named_parameters())
    loss = lambda p, x: torch.func.functional_call(model, p, (x, batch)).sum()  # noqa: E731
    with pytest.raises(TrainingError, match=r"inside a transform of torch\.func"):
        torch.func.grad(loss)(parameters, ones(2))
    with pytest.raises(TrainingError, match=r"inside a transform of torch\.func"):
        torch.func.vmap(lambda x: model(x, batch))(torch.ones(3, 2, 1))
    rows = model.table(batch)[:, 0]  # as it says: before the transform
    per_sample = torch.func.vmap(
        torch.func.grad(lambda row, x: model.net(torch.cat([x, row])).sum())
    )(rows, ones(2))
    (rows * per_sample.detach()).sum().backward()
    assert model.table.step == 1


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_hooks():
    model = Clicks(seed=1)
    twin = Clicks(seed=1)
    calls = []
    table = model.table
    table.register_forward_pre_hook(lambda *_: calls.append("before"))
    table.register_forward_hook(lambda *_: calls.append("after"))
    table.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,))
    table.register_full_backward_hook(lambda _, into, grads: calls.append(grads[0].shape))
    model(ones(2), ids(1, 2)).sum().backward()
    assert calls == ["before", "after", torch.Size([2, 1, 4])]
    rows = twin.table(ids(1, 2))
    rows.register_hook(lambda gradient: gradient * 2)  # rows move by what hooks return
    twin.net(torch.cat([ones(2), rows[:, 0]], 1)).sum().backward()
    assert torch.equal(model.rows, twin.rows)


def test_gradients_that_were_not_asked_of_rows():
    model = Clicks()
    x = ones(2, requires_grad=True)
    before = model.rows
    weight = model.net[0].weight
    torch.autograd.grad(model(x, ids(1, 2)).sum(), [x, weight])
    model(x, ids(1, 2)).sum().backward(inputs=[x])
    assert torch.equal(model.rows, before) and model.table.step == 0
    rows = model.table(ids(1, 2))
    (gradient,) = torch.autograd.grad(model.net(torch.cat([x, rows[:, 0]], 1)).sum(), rows)
    assert gradient.abs().sum() > 0 and torch.equal(model.rows, before)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_double_backward():
    model = Clicks(seed=1)
    twin = Clicks(seed=1)
    x = ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x, ids(1, 2)).sum(), x, create_graph=True)
    gradient.square().sum().backward()  # a penalty reaches rows, in one backward
    assert model.table.step == 1 and not torch.equal(model.rows, twin.rows)
    loss = twin(x, ids(1, 2)).sum()
    loss.backward(create_graph=True)
    assert twin.table.step == 1
    with pytest.raises(TrainingError, match="second backward"):
        x.grad.square().sum().backward()
    assert twin.table.step == 1


def test_anomaly_and_inference_mode():
    model = Clicks(seed=1)
    twin = Clicks(seed=1)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        model(ones(2), ids(1, 2)).sum().backward()
    twin(ones(2), ids(1, 2)).sum().backward()
    assert torch.equal(model.rows, twin.rows)
    with torch.inference_mode():
        assert torch.equal(model(ones(2), ids(1, 2)), twin(ones(2), ids(1, 2)))
    assert model.table.step == 1


def test_a_closure():
    model = Clicks(seed=1)
    twin = Clicks(seed=1)
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), model.table.fused_optimizer):

        def closure():
            loss = model(ones(2), ids(1, 2)).square().mean()
            loss.backward()
            return loss

        optimizer.zero_grad()
        assert optimizer.step(closure=closure).requires_grad
    losses_of_twin = torch.optim.SGD(twin.parameters(), lr=0.1)
    for steps in (True, False):
        twin.zero_grad() if steps else None
        twin(ones(2), ids(1, 2)).square().mean().backward()
        losses_of_twin.step() if steps else None
    assert torch.equal(model.rows, twin.rows) and model.table.step == 2


def test_closures_that_are_evaluated_again():
    """Rows move with each evaluation.

    Around frozen ones LBFGS does what it does to dense layers alone.
    """
    model = Clicks(seed=1)
    twin = Clicks(seed=1)

    def closure(model, inputs):
        def loss():
            model.zero_grad()
            value = (model.net(inputs(model)).squeeze(1) - 3).square().mean()
            value.backward()
            return value

        return loss

    with torch.no_grad():
        fixed = torch.cat([ones(2), twin.table(ids(1, 2))[:, 0]], 1)
    looks_up = closure(model, lambda m: torch.cat([ones(2), m.table(ids(1, 2))[:, 0]], 1))
    model.table.requires_grad_(False)
    rows = model.rows
    torch.optim.LBFGS(model.parameters(), max_iter=4).step(looks_up)
    torch.optim.LBFGS(twin.net.parameters(), max_iter=4).step(closure(twin, lambda _: fixed))
    assert torch.equal(model.rows, rows)
    assert all(map(torch.equal, model.net.parameters(), twin.net.parameters()))
    model.table.requires_grad_()
    torch.optim.LBFGS(model.parameters(), max_iter=4, max_eval=4).step(looks_up)
    assert model.table.step > 1 and not torch.equal(model.rows, rows)


def test_schedulers():
    model = Clicks(pb.SGD(lr=1.0))
    schedule = torch.optim.lr_scheduler.StepLR(model.table.fused_optimizer, 1, gamma=0.5)
    moved = []
    for _ in range(2):
        before = model.rows
        model.table(ids(1)).sum().backward()
        model.table.fused_optimizer.step()
        schedule.step()
        moved.append((before - model.rows)[1, 0].item())
    assert moved == pytest.approx([1.0, 0.5])


def test_accumulation():
    """Dense gradients are summed.

    Rows are updated by each backward, or once by one backward of one lookup.
    """
    model = Clicks(seed=1)
    whole = Clicks(seed=1)
    before = model.rows
    for part in (ids(1, 2), ids(1, 3)):
        (model(ones(2), part).sum() / 4).backward()
    (whole(ones(4), ids(1, 2, 1, 3)).sum() / 4).backward()
    assert (model.table.step, whole.table.step) == (2, 1)
    torch.testing.assert_close(model.rows[2], whole.rows[2])  # of the first part alone
    assert not torch.equal(model.rows[1], whole.rows[1]), "it had moved before the second part"
    assert not torch.equal(model.rows[1], before[1])


def test_two_lookups_before_one_backward_are_two_steps_and_a_warning(caplog):
    model = Clicks(seed=1)
    for _ in range(2):
        model(ones(2), ids(1, 2)).sum().backward()
    assert not caplog.messages
    for _ in range(2):
        (model(ones(2), ids(1, 2)).sum() + model(ones(2), ids(1, 3)).sum()).backward()
    assert model.table.step == 6
    (message,) = caplog.messages
    assert "two lookups" in message and "look up one batch" in message


def test_clipping():
    model = Clicks(seed=1)
    twin = Clicks(seed=1)
    for each in (model, twin):
        rows = each.table(ids(1, 2))
        if each is model:
            rows.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        each.net(torch.cat([ones(2), rows[:, 0]], 1)).sum().backward()
    start = Clicks(seed=1).rows
    assert (model.rows - start).abs().max() <= 0.5 * 0.01 + 1e-7 < (twin.rows - start).abs().max()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm == torch.nn.utils.get_total_norm([p.grad for p in twin.net.parameters()])
    bounded = Clicks(pb.SGD(lr=0.5, max_row_norm=0.01), seed=1)
    bounded(ones(2), ids(1, 2)).sum().backward()
    assert (bounded.rows - start).norm(dim=1).max() <= 0.5 * 0.01 + 1e-7


def test_threads():
    """One thread at a time trains, whichever; lookups that train nothing may run side by side."""
    model = Clicks(seed=1)
    twin = Clicks(seed=1)
    for step in range(3):
        thread = Thread(
            target=lambda step=step: model(ones(2), ids(step, 2)).sum().backward(), daemon=True
        )
        thread.start()
        thread.join(60)
        twin(ones(2), ids(step, 2)).sum().backward()
    assert torch.equal(model.rows, twin.rows)
    model.eval()
    want = [model(ones(2), ids(n % 6, 2)).detach() for n in range(24)]

    def score(n):
        with torch.no_grad():
            return model(ones(2), ids(n % 6, 2))

    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(score, range(24), timeout=60), want))
