"""`pibroch.save` and `pibroch.load` in one process.

Every optimizer and scheduler of torch's, and what is refused.
"""

import logging
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import pibroch as pb
from pibroch import storage
from pibroch.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    StorageError,
    TrainingError,
)
from pibroch.state import checkpoint
from pibroch.state.manifest import read_manifest
from pibroch.state.tables import SavedTable
from small_run import files_below, make_config, run_command, train_here

TABLES = [pb.Table("a", 9, 4), pb.Table("b", 7, 2)]
ROWS = {"a": pb.Adam(lr=0.1), "b": pb.Frozen()}
LR = torch.optim.lr_scheduler
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}
SCHEDULERS = {
    "step": lambda o: LR.StepLR(o, 2),
    "multi_step": lambda o: LR.MultiStepLR(o, [2, 2, 5]),
    "exponential": lambda o: LR.ExponentialLR(o, 0.9),
    "cosine": lambda o: LR.CosineAnnealingLR(o, 9),
    "restarts": lambda o: LR.CosineAnnealingWarmRestarts(o, 3),
    "linear": lambda o: LR.LinearLR(o, total_iters=6),
    "constant": lambda o: LR.ConstantLR(o, total_iters=3),
    "polynomial": lambda o: LR.PolynomialLR(o, 9),
    "cyclic": lambda o: LR.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "one_cycle": lambda o: LR.OneCycleLR(o, 0.2, total_steps=20),
    "lambda": lambda o: LR.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: LR.MultiplicativeLR(o, lambda step: 0.9),
    "sequential": lambda o: LR.SequentialLR(
        o, [LR.ConstantLR(o, total_iters=3), LR.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: LR.ChainedScheduler(
        [LR.ConstantLR(o, total_iters=3), LR.ExponentialLR(o, 0.9)], o
    ),
    "plateau": lambda o: LR.ReduceLROnPlateau(o, patience=0),
}


class Program:
    def __init__(self, seed=0, optimizer="adam", scheduler="step", tables=TABLES, rows=ROWS):
        self.embeddings = pb.Embeddings(tables, rows, seed=seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Linear(3, 1)
        )
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)

    @property
    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, first, last):
        for step in range(first, last + 1):
            ids = torch.randint(7, (2, 8), generator=torch.Generator().manual_seed(step))
            batch = pb.JaggedBatch.from_one_hot(
                torch.zeros(8, 0), ["a", "b"], ids, (ids[0] % 2).float()
            )

            def loss(batch=batch):
                self.optimizer.zero_grad()
                logits = self.model(self.embeddings(batch).cat()).squeeze(1)
                value = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
                value.backward()
                return value

            value = self.optimizer.step(loss)
            self.scheduler.step(
                *([value.item()] if isinstance(self.scheduler, LR.ReduceLROnPlateau) else [])
            )

    def numbers(self):
        state = {**self.model.state_dict(), **self.embeddings.full_state_dict(row_state=True)}
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return (
            {name: tensor.numpy().copy() for name, tensor in state.items()},
            rates,
            self.embeddings.step,
        )


def assert_same(one, other):
    for name, numbers in one[0].items():
        np.testing.assert_array_equal(numbers, other[0][name], name)
    assert one[1:] == other[1:]


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [*((name, "step") for name in OPTIMIZERS), *(("momentum", name) for name in SCHEDULERS)],
)
def test_goes_on_to_the_same_bits(tmp_path, optimizer, scheduler):
    program = Program(1, optimizer, scheduler)
    program.train(1, 3)
    pb.save(
        tmp_path, program.embeddings, **program.parts, step=3
    )  # LBFGS looks at a batch several times
    program.train(4, 6)

    other = Program(2, optimizer, scheduler)
    assert pb.load(tmp_path, other.embeddings, **other.parts).step == 3
    other.train(4, 6)
    assert_same(other.numbers(), program.numbers())


class Wide(nn.Module):
    """A model with its tables inside, and numbers of many types."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.tables = pb.Embeddings(TABLES, ROWS, seed=seed)
        self.head = nn.Linear(6, 2).bfloat16()
        self.register_buffer("mask", torch.full((2, 2), float("-inf")))
        for dtype in (
            torch.float16,
            torch.uint8,
            torch.complex64,
            torch.int16,
            torch.float8_e4m3fn,
            torch.bool,
        ):
            self.register_buffer(f"a_{dtype}".replace(".", "_"), torch.full((3, 1), seed).to(dtype))

    def get_extra_state(self):
        return {"seen": (1, {2: "two"})}

    def set_extra_state(self, state):
        self.extra = state


def test_several_parts_tables_inside_a_model_and_types_of_every_kind(tmp_path):
    wide = Wide(1)
    deep = nn.Linear(2, 2)
    models = {"wide": wide, "deep": deep}
    optimizers = {"deep/1": torch.optim.SGD(deep.parameters(), lr=0.5)}
    extra = {
        "tuple": (1, [2.5, None]),
        3: "int",
        "inf": float("inf"),
        "numbers": torch.arange(3),
        "np": np.int64(4),
    }
    position = {"epoch": 1, "seeds": (1, 2)}
    pb.save(
        tmp_path, wide.tables, model=models, optimizer=optimizers, extra=extra, position=position
    )
    files = files_below(tmp_path)
    assert not any("deep%2F1" in name for name in files)  # no state, no file
    assert not any(b"embedding_bags" in content for content in files.values())

    other = Wide(2)
    models["deep"] = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(models["deep"].parameters(), lr=0.1)
    saved = pb.load(
        tmp_path, other.tables, model={**models, "wide": other}, optimizer={"deep/1": optimizer}
    )
    assert saved.position == position and optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(saved.extra.pop("numbers"), extra.pop("numbers")) and saved.extra == extra
    state = other.state_dict()
    assert other.extra == state.pop("_extra_state") == {"seen": (1, {2: "two"})}
    for name, tensor in state.items():
        assert tensor.dtype == wide.state_dict()[name].dtype and torch.equal(
            tensor, wide.state_dict()[name]
        ), name
    assert torch.equal(deep.weight, models["deep"].weight)


def test_rows_of_other_tables_and_missing_parts_are_refused(tmp_path):
    program = Program(1)
    program.train(1, 1)
    pb.save(tmp_path, program.embeddings, model=program.model, optimizer=program.optimizer)
    before = program.numbers()
    wrong = [
        (
            {"tables": [TABLES[0], pb.Table("b", 8, 2)]},
            {},
            "table 'b' with 7 rows x 2 .* need 8 rows x 2",
        ),
        (
            {"tables": [TABLES[0], pb.Table("b", 7, 3)]},
            {},
            "table 'b' with 7 rows x 2 .* need 7 rows x 3",
        ),
        (
            {"tables": [*TABLES, pb.Table("c", 7, 3)], "rows": {**ROWS, "c": pb.SGD(lr=0.1)}},
            {},
            "no table 'c' in the checkpoint",
        ),
        ({"rows": pb.Adagrad(lr=0.1)}, {}, r"exp_avg\[4\].* in the checkpoint; need .*sum\[4\]"),
        (
            {},
            {"scheduler": True},
            "no scheduler in a checkpoint of tables, model, optimizer; .* leave scheduler= out",
        ),
        ({}, {"model": nn.Linear(1, 1)}, "model in the checkpoint that does not fit"),
        (
            {},
            {"model": {"x": nn.Linear(1, 1)}},
            "no model 'x' in a checkpoint of tables, model, optimizer",
        ),
        (
            {"optimizer": "momentum"},
            {"model": True, "optimizer": True},
            "state of Adam in the checkpoint; need of SGD",
        ),
    ]
    for options, parts, message in wrong:
        other = Program(2, **options)
        chosen = {
            name: getattr(other, name) if part is True else part for name, part in parts.items()
        }
        with pytest.raises(CheckpointError, match=message):
            pb.load(tmp_path, other.embeddings, **chosen)
    more = torch.optim.Adam([*program.model.parameters(), nn.Parameter(torch.ones(1))])
    for optimizer, message in (
        (
            torch.optim.Adam(list(program.model.parameters())[:-1]),
            "with '3.bias' in the checkpoint alone",
        ),
        (more, "with '0.6' in this program alone"),
        (
            torch.optim.Adam([{"params": [each]} for each in program.model.parameters()]),
            "of 1 parameter groups",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            pb.load(tmp_path, program.embeddings, model=program.model, optimizer=optimizer)
    assert_same(program.numbers(), before)


def test_what_cannot_be_stored_is_named_and_nothing_is_written(tmp_path):
    program = Program(1)
    other = nn.ModuleDict({"tables": pb.Embeddings([pb.Table("z", 3, 2)], pb.SGD(lr=1.0))})
    position = "position=3; need batch.position"
    for options, message in (
        (
            {"extra": {"deep": [{"f": open}]}},
            "extra/deep/0/f, a builtin_function_or_method, to be saved",
        ),
        ({"extra": {"x": torch.ones(2, device="meta")}}, "extra/x, a Tensor"),
        ({"extra": {"x": torch.ones(2).to_sparse()}}, "extra/x, a Tensor .*sparse"),
        ({"extra": {1, 2}}, "extra, a set"),
        ({"position": 3}, position),
        ({"position": {"x": torch.ones(1)}}, "position="),
        ({"model": 3}, "got model, a int; need a torch module"),
        ({"optimizer": {"x": nn.Linear(1, 1)}}, "optimizer@x, a Linear; need a torch optimizer"),
        ({"scheduler": object()}, "need something with state_dict"),
        ({"step": -1}, "step -1"),
        ({"keep": 0}, "keep 0"),
        ({"model": other}, "tables z in it"),
    ):
        with pytest.raises(ConfigError, match=message):
            pb.save(tmp_path / "new", program.embeddings, **options)
    assert not (tmp_path / "new").exists()
    with torch.no_grad():
        program.model[0].weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match=r"infinite numbers in '0.weight'"):
        pb.save(tmp_path / "new", program.embeddings, model=program.model)
    assert files_below(tmp_path) == {}


def test_no_checkpoint_and_damaged_ones(tmp_path, caplog):
    program = Program(1)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*pass missing_ok=True"):
        pb.load(tmp_path / "nowhere", program.embeddings)
    assert pb.load(tmp_path, program.embeddings, missing_ok=True).step == 0
    for step in (1, 2, 3):
        program.train(step, step)
        path = pb.save(tmp_path, program.embeddings, **program.parts, keep=None)
    for file in ("dense.safetensors", "manifest.json", "tables/a.safetensors"):
        shutil.copytree(path, tmp_path / "kept")
        content = (path / file).read_bytes()
        (path / file).write_bytes(content[:-9])
        other = Program(2)
        assert pb.load(tmp_path, other.embeddings, **other.parts).step == 2
        assert "checkpoint of step 3 is damaged" in caplog.text
        with pytest.raises(DamagedCheckpointError):
            pb.load(path, other.embeddings)
        shutil.rmtree(path)
        (tmp_path / "kept").rename(path)
    for step in (1, 2, 3):
        (tmp_path / f"step-{step:08d}" / "tables" / "b.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"no undamaged checkpoint in .* of step 3 no .*, and 2 older"
    ):
        pb.load(tmp_path, program.embeddings, missing_ok=True)


def test_killed_while_one_checkpoint_takes_the_place_of_another(tmp_path, monkeypatch):
    program = Program(1)
    program.train(1, 1)
    path = pb.save(tmp_path, program.embeddings, **program.parts)
    before = program.numbers()
    path.rename(storage.replaced_name(path))  # as far as it came
    other = Program(2)
    assert pb.load(tmp_path, other.embeddings, **other.parts).step == 1
    assert_same(other.numbers(), before)
    other.train(2, 2)
    pb.save(tmp_path, other.embeddings, **other.parts)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "flush_to_disk", full)
    kept = files_below(tmp_path)
    with pytest.raises(StorageError, match="No space left"):
        pb.save(tmp_path, other.embeddings, **other.parts)
    assert files_below(tmp_path) == kept


def test_weights_alone_into_tables_of_another_optimizer_and_what_stays_behind(tmp_path, caplog):
    program = Program(1)
    program.train(1, 3)
    pb.save(tmp_path, program.embeddings, **program.parts)
    rows = {"a": pb.SGD(lr=0.1, average=0.9), "b": pb.RowWiseAdagrad(lr=0.5)}
    other = Program(2, rows=rows)
    pb.load(tmp_path, other.embeddings, model=other.model, row_state=False)
    assert "not loaded: optimizer, scheduler" in caplog.text
    weights, expected = (each.embeddings.full_state_dict() for each in (other, program))
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor)
    with other.embeddings.averaged(), torch.no_grad():
        batch = pb.JaggedBatch.from_one_hot(
            torch.zeros(2, 0), ["a", "b"], torch.tensor([[1, 2], [3, 4]]), torch.zeros(2)
        )
        assert torch.equal(
            other.embeddings(batch)["a"], expected["embedding_bags.a.weight"][[1, 2]]
        )
    assert other.embeddings.step == 0 and other.embeddings.learning_rate == 0.1


def test_rates_of_rows_follow_their_tables(tmp_path):
    rows = {"a": pb.SGD(lr=0.1), "b": pb.SGD(lr=0.3)}
    tables = [TABLES[0], pb.Table("b", 7, 4)]
    embeddings = pb.Embeddings(tables, rows)
    scheduler = LR.ExponentialLR(embeddings.fused_optimizer, 0.5)
    embeddings.fused_optimizer.step()
    scheduler.step()
    pb.save(tmp_path, embeddings, scheduler=scheduler)
    swapped = pb.Embeddings(tables[::-1], rows)
    pb.load(tmp_path, swapped)
    assert swapped.fused_optimizer.learning_rates == [0.15, 0.05]
    with pytest.raises(CheckpointError, match="'a' and 'b' with one optimizer"):
        pb.load(tmp_path, pb.Embeddings(tables, pb.SGD(lr=0.1)))


def test_a_checkpoint_of_a_run_into_a_program_and_the_other_way_about(tmp_path, data):
    run, _ = train_here(make_config(data, "train.epochs=1"), tmp_path / "run")
    manifest = read_manifest(run.checkpoints_path / "step-00000021")
    tables = [pb.Table(name, saved.num_rows, saved.dim) for name, saved in manifest.tables.items()]
    embeddings = pb.Embeddings(tables, pb.Adam(lr=0.5))
    from pibroch.models import build_model

    torch.manual_seed(0)
    model = build_model("dlrm", 13, 26, dim=4, bottom=(8,), top=(16,), dropout=0.2, batch_norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    saved = pb.load(run.path, embeddings, model=model, optimizer=optimizer)
    assert saved.step == embeddings.step == 21 and embeddings.learning_rate == 0.01
    assert optimizer.state_dict()["state"][0]["step"] == 21

    path = pb.save(tmp_path / "program", embeddings, model=model, optimizer=optimizer, extra="x")
    assert (
        files_below(path)["dense.safetensors"]
        == files_below(run.checkpoints_path / "step-00000021")["dense.safetensors"]
    )
    inspected = run_command("checkpoint", "inspect", tmp_path / "program")
    assert "step 21" in inspected.stdout and "a program of one's own" in inspected.stdout, (
        inspected.stderr
    )
    assert "tables, model, optimizer, extra; position not saved" in inspected.stdout
    assert run_command("checkpoint", "verify", path).returncode == 0
    refused = run_command("evaluate", "--checkpoint", path, "--data", data)
    assert (
        refused.returncode == 2
        and "pibroch.save wrote" in refused.stderr
        and "Traceback" not in refused.stderr
    )
    with pytest.raises(CheckpointError, match=r"load it by pibroch\.load"):
        pb.Predictor.open(path)
    assert isinstance(read_manifest(path).tables["C1"], SavedTable)


def test_random_numbers_go_on(tmp_path, caplog):
    embeddings = pb.Embeddings(TABLES, ROWS)
    torch.manual_seed(4)
    pb.save(tmp_path, embeddings)
    drawn = torch.rand(3)
    with caplog.at_level(logging.INFO):
        pb.load(tmp_path, embeddings)
    assert torch.equal(torch.rand(3), drawn)
    assert "random state stays" not in caplog.text
