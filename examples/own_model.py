"""Your own torch model with pibroch's embeddings: the lines marked `pibroch` are all that changes.

Below, the same model and a loss for recipes, where `pibroch train` does the rest.

Run: python examples/own_model.py
"""

from collections.abc import Callable

import torch
from torch import nn

import pibroch as pb
from pibroch.config import LossConfig, ModelConfig
from pibroch.models import Loss, Model

NUM_ROWS = {"user": 5_000, "item": 2_000, "shop": 50}


def clicks(num_batches: int, batch_size: int, seed: int):
    """Generated clicks: a user, an item and a shop like each other or not, by their ids alone."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_batches):
        ids = torch.stack(
            [torch.randint(rows, (batch_size,), generator=generator) for rows in NUM_ROWS.values()]
        )
        dense = torch.rand(batch_size, 4, generator=generator)
        taste = (ids[0] % 7 - 3) * (ids[1] % 5 - 2) / 3 + (ids[2] % 3 - 1) + dense[:, 0] - 0.5
        labels = (torch.rand(batch_size, generator=generator) < torch.sigmoid(taste)).float()
        yield pb.JaggedBatch.from_one_hot(dense, list(NUM_ROWS), ids, labels)


class MyModel(nn.Module):
    """Any nn.Module: embeddings come in as one tensor [B, F, D]."""

    def __init__(self, num_dense: int, num_features: int, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(num_dense + num_features * dim, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, dense: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([dense, embedded.flatten(1)], 1)).squeeze(1)


class ClicksConfig(ModelConfig):
    """`[model]` of a recipe, beside `name`, `dim` and `embedding_dropout`."""

    hidden: int = 64


class Clicks(Model):
    """The model for recipes: built for the features of the data, logits [B] out."""

    section = ClicksConfig

    def __init__(self, num_dense: int, num_features: int, config: ClicksConfig) -> None:
        super().__init__(num_dense, num_features, config)
        self.net = nn.Sequential(
            nn.Linear(num_dense + num_features * config.dim, config.hidden),
            nn.ReLU(),
            nn.Linear(config.hidden, 1),
        )

    def logits(self, dense: torch.Tensor, embeddings: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self.net(torch.cat([dense, embeddings().flatten(1)], 1)).squeeze(1)


class FocalConfig(LossConfig):
    """`[loss]` of a recipe, beside `name`."""

    gamma: float = 2.0


class Focal(Loss):
    """Samples that are predicted well weigh less (Lin et al. 2017)."""

    section = FocalConfig

    def __init__(self, config: FocalConfig) -> None:
        super().__init__(config)
        self.gamma = config.gamma

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        margins = logits * (2 * labels - 1)
        missed = torch.exp(self.gamma * nn.functional.logsigmoid(-margins))
        loss = -missed * nn.functional.logsigmoid(margins)
        return loss.mean() if weights is None else (loss * weights).mean()


def main() -> list[float]:
    torch.manual_seed(0)
    model = MyModel(num_dense=4, num_features=len(NUM_ROWS), dim=16)
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tables = [pb.Table(name, num_rows=rows, dim=16) for name, rows in NUM_ROWS.items()]  # pibroch
    embeddings = pb.Embeddings(tables, optimizer=pb.RowWiseAdagrad(lr=0.1))  # pibroch
    losses = []
    for batch in embeddings.feed(clicks(num_batches=300, batch_size=512, seed=1)):  # pibroch
        logits = model(batch.dense, embeddings(batch))  # pibroch
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()  # the rows are updated in here
        dense_optimizer.step()
        dense_optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main()
    print(
        f"log loss: first 10 batches {sum(losses[:10]) / 10:.4f}, last 10 batches"
        f" {sum(losses[-10:]) / 10:.4f}"
    )
