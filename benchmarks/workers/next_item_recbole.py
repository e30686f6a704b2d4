"""A training of topic ``next_item`` in RecBole, as its own quick start does it.

Run by RecBole's Python: ``CASE FOLDER``, where ``FOLDER/events/events.inter`` has the events.
Prints figures as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.utils import get_model, get_trainer, init_seed

from benchmarks.next_item_case import DATASET, TOP, NextItemCase

MODELS = {"sasrec": "SASRec", "two_tower": "DSSM"}


def settings(case: NextItemCase, folder: str) -> dict[str, Any]:
    """The case as RecBole takes it."""
    of_model: dict[str, Any] = {
        "train_neg_sample_args": None,
        "loss_type": "CE",
        "n_layers": case.blocks,
        "n_heads": case.heads,
        "hidden_size": case.dim,
        "inner_size": case.dim,
        "hidden_act": "relu",
        "hidden_dropout_prob": case.dropout,
        "attn_dropout_prob": case.dropout,
        "MAX_ITEM_LIST_LENGTH": case.max_length,
    }
    if case.model == "two_tower":  # an item that the user has not had beside each that he has
        of_model = {
            "train_neg_sample_args": {"distribution": "uniform", "sample_num": 1},
            "embedding_size": case.dim,
            "mlp_hidden_size": [case.dim, case.dim],
            "dropout_prob": case.dropout,
        }
    return of_model | {
        "data_path": folder,
        "checkpoint_dir": f"{folder}/saved",
        "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
        # the last item of a user is tested, the one before validates, each among all items
        "eval_args": {
            "split": {"LS": "valid_and_test"},
            "order": "TO",
            "mode": "full",
            "group_by": "user",
        },
        "metrics": ["Hit", "NDCG"],
        "topk": [TOP],
        "valid_metric": f"NDCG@{TOP}",
        "seed": case.seed,
        "learning_rate": case.lr,
        "train_batch_size": case.pairs,
        "eval_batch_size": 1 << 20,
        "epochs": case.epochs,
        "stopping_step": case.patience - 1,  # it stops when there were more
        "use_gpu": False,
        "show_progress": False,
        "state": "WARNING",
    }


def main() -> None:
    """Train and test."""
    case = NextItemCase.from_json(sys.argv[1])
    os.chdir(sys.argv[2])  # to which it writes logs
    # what it saved itself, which torch does not load by default since 2.6
    torch.load = partial(torch.load, weights_only=False)
    name = MODELS[case.model]
    config = Config(model=name, dataset=DATASET, config_dict=settings(case, "."))
    init_seed(case.seed, True)
    train, validation, test = data_preparation(config, create_dataset(config))
    init_seed(case.seed, True)
    model = get_model(name)(config, train.dataset)
    trainer = get_trainer(config["MODEL_TYPE"], name)(config, model)
    seconds = []
    scores = []
    train_epoch = trainer._train_epoch
    validate_epoch = trainer._valid_epoch

    def timed(*words: object, **options: object) -> object:
        began = time.perf_counter()
        loss = train_epoch(*words, **options)
        seconds.append(time.perf_counter() - began)
        return loss

    def noted(*words: object, **options: object) -> tuple[float, object]:
        score, result = validate_epoch(*words, **options)
        scores.append(float(score))
        return score, result

    trainer._train_epoch = timed
    trainer._valid_epoch = noted
    trainer.fit(train, validation, saved=True, show_progress=False)
    found = trainer.evaluate(test, load_best_model=True, show_progress=False)
    figures = {
        "hr": float(found[f"hit@{TOP}"]),
        "ndcg": float(found[f"ndcg@{TOP}"]),
        "seconds": seconds,
        "validation": scores,
        "versions": {name: version(name) for name in ("recbole", "torch")},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
