"""A DLRM on TorchRec that goes on from its newest checkpoint when torchrun starts it again.

Run: torchrun --standalone --nproc-per-node 2 --max-restarts 9 -m
benchmarks.workers.torchrec_restarts FOLDER ROWS SECONDS. The folder has what a run of pibroch has
there: ``metrics.jsonl``, ``checkpoints/step-N``, and a line of ``restarts.jsonl`` for each start
that goes on from one.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

NUM_TABLES = 26
NUM_DENSE = 13
DIM = 16
BATCH_SIZE = 2048
NAMES = [f"C{number}" for number in range(NUM_TABLES)]
SKEW = 3.0
"""Ids are a uniform number to this power, times the rows.

A tenth of the rows has almost half of all reads.
"""


def batch_of(step: int, num_rows: int) -> Batch:
    """This rank's part of a step's batch; the same whenever it is asked for."""
    size = BATCH_SIZE // dist.get_world_size()
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
    ids = (
        (torch.rand(NUM_TABLES * size, generator=draw) ** SKEW * num_rows)
        .long()
        .clamp_(max=num_rows - 1)
    )
    sparse = KeyedJaggedTensor.from_lengths_sync(
        NAMES, ids, torch.ones(len(ids), dtype=torch.int32)
    )
    return Batch(torch.rand(size, NUM_DENSE, generator=draw), sparse, (ids[:size] % 2).float())


class Run:
    """The model of a rank, and what is kept of it.

    Args:
        folder: of the run.
        num_rows: of each table.
    """

    def __init__(self, folder: Path, num_rows: int) -> None:
        self._folder = folder
        self._num_rows = num_rows
        self.step = 0
        tables = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name, embedding_dim=DIM, num_embeddings=num_rows, feature_names=[name]
                )
                for name in NAMES
            ],
            device=torch.device("meta"),
        )
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.05})
        torch.manual_seed(0)  # the dense layers'; tables are of no account here
        dlrm = DLRM(tables, NUM_DENSE, [64, DIM], [64, 1], dense_device=torch.device("cpu"))
        self._model = DistributedModelParallel(DLRMTrain(dlrm), device=torch.device("cpu"))
        dense = dict(in_backward_optimizer_filter(self._model.named_parameters()))
        self._optimizer = KeyedOptimizerWrapper(
            dense, lambda parameters: torch.optim.Adam(parameters, lr=1e-3, foreach=False)
        )

    def train_step(self) -> float:
        """The loss of one more step, of all samples."""
        self._optimizer.zero_grad()
        loss, _ = self._model(batch_of(self.step, self._num_rows))
        loss.backward()
        self._optimizer.step()
        mean: Tensor = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        self.step += 1
        return mean.item()

    def save(self) -> None:
        """One checkpoint in place of that before; a folder appears when it is whole."""
        folder = self._folder / "checkpoints"
        rank = dist.get_rank()
        making = folder / "new"
        name = f"step-{self.step}"
        save(self._state(), checkpoint_id=making)
        if rank == 0:
            older = list(folder.glob("step-*"))
            making.rename(folder / name)
            for each in older:
                shutil.rmtree(each)
        dist.barrier()

    def load(self) -> bool:
        """Go on from the newest checkpoint, if there is one."""
        steps = [int(path.name[5:]) for path in (self._folder / "checkpoints").glob("step-*")]
        if not steps:
            return False
        self.step = max(steps)
        self._optimizer.init_state()
        state = self._state()
        load(state, checkpoint_id=self._folder / "checkpoints" / f"step-{self.step}")
        self._model.load_state_dict(state["model"])
        return True

    def _state(self) -> dict[str, Mapping[str, object]]:
        """Of weights and both optimizers."""
        return {
            "model": self._model.state_dict(),
            "rows": self._model.fused_optimizer.state_dict(),
            "dense": self._optimizer.state_dict(),
        }


def main() -> None:
    """Train until somebody ends it."""
    folder = Path(sys.argv[1])
    num_rows = int(sys.argv[2])
    every_s = float(sys.argv[3])
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    Path("/proc/self/comm").write_text(f"rank {rank}")
    run = Run(folder, num_rows)
    goes_on = run.load()
    dist.barrier()
    if rank == 0 and goes_on:
        with (folder / "restarts.jsonl").open("a") as restarts:
            restarts.write(json.dumps({"from_step": run.step}) + "\n")
    saved_at = time.monotonic()
    with (folder / "metrics.jsonl").open("a") as metrics:
        while True:
            loss = run.train_step()
            if rank == 0:
                metrics.write(
                    json.dumps({"kind": "training", "step": run.step, "loss": loss}) + "\n"
                )
                metrics.flush()
            is_due = torch.tensor(float(time.monotonic() - saved_at > every_s))
            dist.all_reduce(is_due, dist.ReduceOp.MAX)
            if is_due.item():
                run.save()
                saved_at = time.monotonic()


if __name__ == "__main__":
    main()
