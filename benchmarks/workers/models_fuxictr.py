"""A run of topic ``models`` in FuxiCTR, as its own experiments are run.

Run by FuxiCTR's Python: ``CASE FOLDER START [WEIGHTS]``, where ``FOLDER`` is what
:func:`benchmarks.fuxictr_data.write_dataset` wrote, ``START`` the weights with which pibroch's run
began, and ``WEIGHTS`` a trained model of pibroch's, whose scores the model must have, too. Prints
figures as JSON.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.dataloaders import RankDataLoader
from fuxictr.pytorch.torch_utils import seed_everything

from benchmarks.model_cases import DATASET, LAYER, SCORES, TABLE, ModelCase
from benchmarks.peers.fuxictr_models import MODELS, Peer

OPTIMIZERS = {"adam": "Adam", "adagrad": "Adagrad"}


def main() -> None:
    """Train, test, and compare."""
    case = ModelCase.from_json(sys.argv[1])
    folder = Path(sys.argv[2])
    (folder / DATASET).mkdir(exist_ok=True)  # of checkpoints
    feature_map = FeatureMap(DATASET, str(folder))
    feature_map.load(str(folder / "feature_map.json"), {"embedding_dim": case.dim})
    seed_everything(case.seed)
    files = {f"{name}_data": str(folder / f"{name}.npz") for name in ("train", "valid", "test")}
    train, valid, test = RankDataLoader(feature_map, "both", batch_size=case.batch_size, **files)
    model = MODELS[case.model](feature_map, case, folder)
    with np.load(sys.argv[3]) as start:
        fill(model, start)
    model.compile(OPTIMIZERS[case.optimizer], "binary_crossentropy", case.lr)
    # the norm of all gradients is always computed; nothing is clipped, as pibroch clips nothing
    model.fit(train, case.epochs, valid, max_gradient_norm=math.inf)
    figures: dict[str, Any] = {
        "auc": model.evaluate(test)["AUC"],
        "epochs": len(model.epoch_seconds),
        "samples_per_second": train.num_samples / min(model.epoch_seconds),
        "versions": {name: version(name) for name in ("fuxictr", "torch")},
    }
    if len(sys.argv) > 4:
        with np.load(sys.argv[4]) as weights:
            fill(model, weights)
            scores = model.predict(test)
            figures["score_gap"] = float(np.abs(scores - weights[SCORES]).max())
    print(json.dumps(figures))


def fill(model: Peer, weights: Mapping[str, np.ndarray]) -> None:
    """Give a model pibroch's weights; a table's rows are its parts side by side.

    Raises:
        ValueError: when the layers are not as many.
    """
    with torch.no_grad():
        for name, tables in model.tables().items():
            rows = torch.from_numpy(weights[TABLE + name])
            widths = [table.embedding_dim for table in tables]
            for table, part in zip(tables, rows.split(widths, 1), strict=True):
                first = 0 if table.padding_idx is None else 1
                table.weight[first:].copy_(part)
        names = [name for name in weights if name.startswith(LAYER)]
        for number, (parameter, _) in enumerate(zip(model.dense_parameters(), names, strict=True)):
            layer = torch.from_numpy(weights[f"{LAYER}{number}"])
            if layer.shape != parameter.shape:
                raise ValueError(f"layer {number} {list(layer.shape)}, {list(parameter.shape)}")
            parameter.copy_(layer)


if __name__ == "__main__":
    main()
