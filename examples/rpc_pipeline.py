"""A small transformer as a pipeline of workers, fed with micro-batches.

Each stage holds some of the layers. A batch is cut into micro-batches: while the second stage
computes the first micro-batch, the first stage is at the second one. Distributed autograd runs the
backward pass over all of them (*PyTorch RPC*, Li et al., MLSys 2023, section 4.4).

Run: python examples/rpc_pipeline.py
On three hosts, N = 0, 1 and 2, with the same PIBROCH_RPC_SECRET:
torchrun --nnodes 3 --node-rank N --master-addr HOST0 --master-port 29500 examples/rpc_pipeline.py
"""

import os
import threading
import time

import torch
from torch import nn

from pibroch import rpc
from pibroch.ports import free_port
from pibroch.rpc import autograd, optim

NUM_STAGES = 2
LAYERS_PER_STAGE = 2
# V, L, W
VOCABULARY = 16
LENGTH = 32
WIDTH = 64
# B
NUM_STEPS = 25
BATCH_SIZE = 96
NUM_MICRO_BATCHES = 4


class Stage(nn.Module):
    """Some layers of the transformer.

    The first stage embeds tokens, the last one computes the loss.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.first = index == 0
        self.last = index == NUM_STAGES - 1
        self.tokens = nn.Embedding(VOCABULARY, WIDTH) if self.first else None
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10) if self.first else None
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)
            for _ in range(LAYERS_PER_STAGE)
        ]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY) if self.last else None
        self.one_at_a_time = threading.Lock()

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [B, L] or hidden states [B, L, W] to hidden states, or to scores [B, L, V]."""
        if self.first:
            x = self.tokens(x) + self.positions
        for layer in self.layers:
            x = layer(x, nn.Transformer.generate_square_subsequent_mask(LENGTH), is_causal=True)
        return self.head(x) if self.last else x

    @rpc.functions.async_execution
    def loss(
        self, x: torch.Tensor, targets_BL: torch.Tensor, rest: list[rpc.RRef]
    ) -> torch.futures.Future:
        """Our part of the work, and then the rest of the pipeline's.

        No thread of ours waits for it.
        """
        with self.one_at_a_time:
            x = self.compute(x)
        if rest:
            return rest[0].rpc_async().loss(x, targets_BL, rest[1:])
        done = torch.futures.Future()
        done.set_result(nn.functional.cross_entropy(x.flatten(0, 1), targets_BL.flatten()))
        return done

    def parameter_rrefs(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def sequences(generator: torch.Generator) -> torch.Tensor:
    """Tokens [B, L + 1]: two random ones that take turns.

    So attention has to find the last token but one.
    """
    pair = torch.randint(VOCABULARY, (BATCH_SIZE, 2), generator=generator)
    return pair.repeat(1, LENGTH)[:, : LENGTH + 1]


def train_step(
    stages: list[rpc.RRef], optimizer: optim.DistributedOptimizer, tokens: torch.Tensor, parts: int
) -> float:
    with autograd.context() as context:
        micro_batches = tokens.chunk(parts)
        sent = [
            stages[0].rpc_async().loss(part[:, :-1], part[:, 1:], stages[1:])
            for part in micro_batches
        ]
        loss = torch.stack(torch.futures.wait_all(sent)).mean()
        autograd.backward(context, [loss])
        optimizer.step(context)
    return loss.item()


def train() -> None:
    """What the coordinator does."""
    stages = [rpc.remote(f"stage{index}", Stage, args=(index,)) for index in range(NUM_STAGES)]
    parameters = [rref for stage in stages for rref in stage.rpc_sync().parameter_rrefs()]
    optimizer = optim.DistributedOptimizer(torch.optim.Adam, parameters, lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for parts in (1, NUM_MICRO_BATCHES):
        began = time.perf_counter()
        losses = [
            train_step(stages, optimizer, sequences(generator), parts) for _ in range(NUM_STEPS)
        ]
        ms_per_step = (time.perf_counter() - began) / NUM_STEPS * 1e3
        print(
            f"{parts} micro-batches: {ms_per_step:.1f} ms a step; loss from {losses[0]:.3f} to"
            f" {losses[-1]:.3f}"
        )
    assert losses[-1] < 0.7  # guessing gives 2.77


def work(rank: int) -> None:
    """One worker from start to end."""
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    rpc.init_rpc(
        "coordinator" if rank == 0 else f"stage{rank - 1}", rank=rank, world_size=NUM_STAGES + 1
    )
    if rank == 0:
        train()
    rpc.shutdown()  # waits until all are done


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
        work(int(os.environ["RANK"]))
    else:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        torch.multiprocessing.spawn(work, nprocs=NUM_STAGES + 1)
