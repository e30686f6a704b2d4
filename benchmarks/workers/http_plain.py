"""A DLRM behind plain FastAPI, as one writes it first.

A pydantic body, dictionaries, ``nn.EmbeddingBag`` a table.

``python http_plain.py FOLDER KIND``: the folder is a float32 export with ``vocabulary.json`` beside
its files; KIND is ``torch`` or ``torchrec``, whose tables are quantised to int8 by its inference
modules. Says its port. Needs nothing of pibroch.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

if site := os.environ.get("PIBROCH_BENCH_SITE"):
    sys.path.append(
        site
    )  # FastAPI and uvicorn, where the peers' environment has none; behind its own packages

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from safetensors.torch import load_file

FEW_ROWS = 32
"""Up to so many a team of threads costs more than it saves, here as there."""


class Body(BaseModel):
    """A request."""

    rows: list[dict[str, str | None]]


def build_tables(
    rows: Tensor, tables: list[dict[str, Any]], kind: str
) -> Callable[[Tensor], Tensor]:
    """Ids ``[B, F]`` to embeddings ``[B, F, D]``."""
    weights = [
        rows[table["first_row"] : table["first_row"] + table["num_rows"]] for table in tables
    ]
    if kind == "torch":
        bags = nn.ModuleList(nn.EmbeddingBag.from_pretrained(each, mode="sum") for each in weights)
        return lambda ids: torch.stack(
            [bag(ids[:, place, None]) for place, bag in enumerate(bags)], 1
        )
    from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
    from torchrec.inference.modules import quantize_embeddings
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

    keys = [table["name"] for table in tables]
    dim = rows.shape[1]
    configs = [
        EmbeddingBagConfig(
            name=name, embedding_dim=dim, num_embeddings=len(each), feature_names=[name]
        )
        for name, each in zip(keys, weights, strict=True)
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
    with torch.no_grad():
        for name, each in zip(keys, weights, strict=True):
            collection.embedding_bags[name].weight.copy_(each)
    quantised = quantize_embeddings(nn.Sequential(collection), dtype=torch.qint8, inplace=False)[0]

    def look_up(ids: Tensor) -> Tensor:
        lengths = torch.ones(ids.numel(), dtype=torch.int32)
        pooled = quantised(
            KeyedJaggedTensor(keys=keys, values=ids.t().reshape(-1), lengths=lengths)
        )
        return pooled.values().view(len(ids), len(keys), dim)

    return look_up


class Dlrm(nn.Module):
    """The layers above the tables, with the export's weights."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.bottom, self.top = (self._stack(state, name) for name in ("bottom", "top"))
        self.bottom.append(nn.ReLU())

    @staticmethod
    def _stack(state: dict[str, Tensor], name: str) -> nn.Sequential:
        layers: list[nn.Module] = []
        for place in range(
            sum(key.startswith(f"{name}.") and key.endswith("weight") for key in state)
        ):
            weight, bias = (state[f"{name}.layers.{place}.{part}"] for part in ("weight", "bias"))
            layer = nn.Linear(weight.shape[1], weight.shape[0])
            layer.weight = nn.Parameter(weight)
            layer.bias = nn.Parameter(bias)
            layers += [layer, nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits ``[B]``."""
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom[:, None], embedded], 1)
        dots = vectors @ vectors.transpose(1, 2)
        rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
        return self.top(torch.cat([bottom, dots[:, rows, columns]], 1)).squeeze(1)


def build_app(folder: Path, kind: str) -> FastAPI:
    """The whole of it."""
    manifest = json.loads((folder / "export.json").read_text())
    vocabulary = json.loads((folder / "vocabulary.json").read_text())
    (shard,) = manifest["shards"]
    look_up = build_tables(load_file(folder / shard["file"])["rows"], manifest["tables"], kind)
    model = Dlrm(load_file(folder / "dense.safetensors")).eval()
    numeric = list(vocabulary["numeric"])
    tables = [
        (name, vocabulary["rows"][name]) for name in (table["name"] for table in manifest["tables"])
    ]
    app = FastAPI()
    threads = torch.get_num_threads()

    def number(text: str | None) -> float:
        value = float(text) if text else 0.0
        return math.copysign(math.log1p(abs(value)), value)

    @app.post("/score")
    async def score(body: Body) -> dict[str, list[float]]:
        torch.set_num_threads(1 if len(body.rows) <= FEW_ROWS else threads)
        dense = torch.tensor([[number(row[name]) for name in numeric] for row in body.rows])
        ids = torch.tensor(
            [[rows.get(row[name] or "", 0) for name, rows in tables] for row in body.rows]
        )
        with torch.inference_mode():
            logits = model(dense, look_up(ids))
        return {"scores": torch.sigmoid(logits).tolist()}

    return app


if __name__ == "__main__":
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        config = uvicorn.Config(
            build_app(Path(sys.argv[1]), sys.argv[2]), access_log=False, log_level="warning"
        )
        print(f"at http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        uvicorn.Server(config).run(sockets=[listener])
