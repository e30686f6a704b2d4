"""Lightning and Accelerate around a model with tables, beside a plain loop over its batches."""

import accelerate
import lightning.pytorch as lightning
import pytest
import torch
from torch import nn

import pibroch as pb

STEPS = 6
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        pb.JaggedBatch.from_one_hot(
            torch.rand(32, 2, generator=generator),
            ["user", "item"],
            torch.randint(0, 40, (2, 32), generator=generator),
            torch.randint(0, 2, (32,), generator=generator).float(),
        )
        for _ in range(STEPS)
    ]


class Model(nn.Module):
    """A linear model of dense features and embeddings."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        tables = [pb.Table("user", 40, 4), pb.Table("item", 40, 4)]
        self.embeddings = pb.Embeddings(tables, pb.Adagrad(lr=0.1), exchange="local", seed=3)
        self.dense = nn.Linear(10, 1)

    def loss(self, batch):
        features = torch.cat([batch.dense, self.embeddings(batch).flatten(1)], 1)
        logits = self.dense(features.to(self.dense.weight.dtype))[:, 0].float()
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def plain(is_mixed=False, dtype=torch.float32):
    model = Model().to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            loss = model.loss(batch)
        loss.backward()
        optimizer.step()
    assert model.embeddings.step == STEPS
    return state_of(model)


def same(got, want):
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


class Lit(lightning.LightningModule):
    """As docs/torch-tools.md says: tables are made here, the optimizer has all parameters."""

    def __init__(self, reads_ahead=False):
        super().__init__()
        self.model = Model()
        self.reads_ahead = reads_ahead

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def training_step(self, batch, _):
        return self.model.loss(batch)

    def train_dataloader(self):
        if self.reads_ahead:
            return self.model.embeddings.feed(batches())
        return torch.utils.data.DataLoader(batches(), batch_size=None)


@pytest.mark.parametrize(
    ("precision", "dtype", "reads_ahead"),
    [
        ("32-true", torch.float32, False),
        ("32-true", torch.float32, True),
        ("32-true", torch.bfloat16, False),
        ("bf16-mixed", torch.float32, False),
    ],
)
def test_lightning_trains_to_the_bits_of_a_plain_loop(tmp_path, precision, dtype, reads_ahead):
    module = Lit(reads_ahead)
    module.model.to(dtype)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        reload_dataloaders_every_n_epochs=1,
        default_root_dir=tmp_path,
    )
    trainer.fit(module)
    assert module.model.embeddings.step == STEPS
    assert same(state_of(module.model), plain(precision == "bf16-mixed", dtype))


def test_lightning_s_checkpoint_has_the_tables_of_one_process(tmp_path):
    module = Lit()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    other = Lit.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert same(state_of(other.model), plain())


def test_accelerate_trains_to_the_bits_of_a_plain_loop():
    accelerator = accelerate.Accelerator(cpu=True)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    for batch in model.embeddings.feed(batches()):
        optimizer.zero_grad()
        accelerator.backward(wrapped.loss(batch))
        optimizer.step()
    assert same(state_of(model), plain())


def test_accelerate_accumulates_dense_gradients_while_rows_move_at_each_step():
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    moves = []
    for batch in batches():
        with accelerator.accumulate(wrapped):
            before = model.dense.weight.detach().clone()
            accelerator.backward(wrapped.loss(batch))
            optimizer.step()
            optimizer.zero_grad()
            moves.append(not torch.equal(before, model.dense.weight))
    assert moves == [False, True] * (STEPS // 2)
    assert model.embeddings.step == STEPS
