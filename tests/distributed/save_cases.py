"""What each rank does in the tests of `pibroch.save`.

A program of one's own with tables of any kind.
"""

import logging
import os
import signal
import sys

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import pibroch as pb

TABLES = [
    pb.Table("user", 40, 8, features=("x", "y")),
    pb.Table("item", 30, 16, pooling="mean"),
    pb.Table("word", 50, 4, pooling="none"),
    pb.Table("still", 20, 8),
    pb.Table("wide", 400, 1, features=("x",)),
]
OPTIMIZERS = {
    "": pb.RowWiseAdagrad(lr=0.3),
    "item": pb.Adam(lr=0.05, weight_decay=0.1),
    "word": pb.Adagrad(lr=0.2),
    "still": pb.Frozen(),
}
SIZE = 12  # of a global batch
FEATURES = tuple(dict.fromkeys(feature for table in TABLES for feature in table.features))


class Program:
    """One rank's part of it; the same batches at every number of ranks."""

    def __init__(self, channel, seed=3, exchange="alltoall", **options):
        self.channel = channel
        ranks = channel.ranks
        several = exchange != "local"
        options |= {"exchange": exchange, "seed": seed} | (
            {"channel": ranks.open_channel()} if several else {}
        )
        self.embeddings = pb.Embeddings(TABLES, OPTIMIZERS, **options)
        torch.manual_seed(seed + ranks.rank)
        self.model = nn.Sequential(
            nn.Linear(8 + 8 + 16 + 4 + 8 + 1, 16), nn.Dropout(0.3), nn.Linear(16, 1)
        )
        self.model = pb.data_parallel(self.model, ranks) if several else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = {
            "dense": torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.02, total_steps=20),
            "rows": torch.optim.lr_scheduler.StepLR(
                self.embeddings.fused_optimizer, step_size=2, gamma=0.5
            ),
        }

    @property
    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, first, last, dropout=True):
        """Steps ``first`` to ``last``, this one included."""
        self.model.train(dropout)
        rank = self.channel.ranks.rank
        size = self.channel.ranks.world_size
        for step in range(first, last + 1):
            batch = batch_of(step, SIZE * rank // size, SIZE * (rank + 1) // size)
            self.step(batch)

    def step(self, batch):
        out = self.embeddings(batch)
        words = out["word"].padded(3).sum(1)
        vectors = [out[name] for name in ("x@user", "y", "item", "still", "x@wide")]
        logits = self.model(torch.cat([*vectors, words], 1)).squeeze(1)
        self.optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        self.optimizer.step()
        self.embeddings.fused_optimizer.step()
        for each in self.scheduler.values():
            each.step()

    def save(self, folder, **options):
        return pb.save(folder, self.embeddings, **self.parts, **options)

    def load(self, folder, **options):
        return pb.load(folder, self.embeddings, **self.parts, **options)

    def numbers(self):
        """All tables with their state, dense weights, and what only schedulers know."""
        whole = {}
        for view in self.embeddings.pieces():
            for field, numbers in {"weight": view.weights, **view.state}.items():
                whole[
                    view.piece.table.name, field, view.piece.rows.start, view.piece.columns.start
                ] = (view.piece, np.array(numbers))
        dense = {name: tensor.numpy().copy() for name, tensor in self.model.state_dict().items()}
        rates = [*self.scheduler["dense"].get_last_lr(), *self.scheduler["rows"].get_last_lr()]
        return (
            whole,
            dense,
            [*rates, *self.embeddings.fused_optimizer.learning_rates, self.embeddings.step],
        )


def batch_of(step, first, last):
    """Samples ``first`` to ``last`` of the global batch of a step."""
    rng = np.random.default_rng(step)
    limit = {"x": 40, "y": 40, "item": 30, "word": 50, "still": 20}
    values = []
    lengths = []
    for feature in FEATURES:
        counts = rng.integers(0, 4, SIZE)
        ids = rng.integers(0, limit[feature], counts.sum())
        ends = counts.cumsum()
        values.append(
            ids[ends[first] - counts[first] : ends[last - 1]] if last > first else ids[:0]
        )
        lengths.append(counts[first:last])
    labels = torch.from_numpy(rng.integers(0, 2, SIZE)[first:last].astype(np.float32))
    offsets = np.concatenate([[0], np.concatenate(lengths).cumsum()]).astype(np.int64)
    ids = torch.from_numpy(np.concatenate(values).astype(np.int64))
    return pb.JaggedBatch(
        torch.zeros(last - first, 0), FEATURES, ids, torch.from_numpy(offsets), labels
    )


def undisturbed(channel, last, dropout=True, **options):
    program = Program(channel, **options)
    program.train(1, last, dropout)
    return program.numbers()


def save_and_die(channel, folder, last, die_in, dropout=True, **options):
    """Save after every other step; every rank kills itself in a step."""
    program = Program(channel, **options)
    program.load(folder, missing_ok=True)
    for step in range(program.embeddings.step + 1, last + 1):
        program.train(step, step, dropout)
        if step == die_in:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 2 == 0:
            program.save(
                folder,
                extra={"step": step, "seen": (1, float("inf"))},
                position={"epoch": 0, "sample": step},
            )
    return program.numbers()


def resume(channel, folder, last, dropout=True, **options):
    """Into other initial numbers; what was loaded, and what came of the steps to ``last``."""
    program = Program(channel, seed=9, **options)
    saved = program.load(folder)
    loaded = program.numbers()
    program.train(saved.step + 1, last, dropout)
    return (saved.step, saved.position, saved.extra), loaded, program.numbers()


def undisturbed_from(channel, folder, last):
    """Without dropout, which depends on the number of ranks in torch's own module."""
    return resume(channel, folder, last, dropout=False)[2]


def save_damage_and_load(channel, folder):
    """Save after steps 2, 4 and 6, damage the last; load, and save again.

    Returns what was loaded and the warnings.
    """
    program = Program(channel)
    for step in (2, 4, 6):
        program.train(step - 1, step)
        program.save(folder)
    channel.barrier()
    if channel.ranks.rank == 0:
        next((folder / "step-00000006" / "tables").iterdir()).unlink()
    channel.barrier()
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("pibroch.train").addHandler(handler)
    program = Program(channel, seed=8)
    saved = program.load(folder)
    logging.getLogger("pibroch.train").removeHandler(handler)
    assert saved.step == 4
    messages = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    program.save(folder)
    return saved.step, messages[0].partition("is ")[2][:11]


def save_badly(channel, folder):
    """Errors of saving at different steps, of what cannot be stored, of a row not finite."""
    program = Program(channel)
    messages = []
    program.train(1, 1)
    rank = channel.ranks.rank
    view = program.embeddings.pieces()[0]
    for attempt in ({"step": 1 + rank}, {"extra": {"f": print if rank == 1 else 1}}, {}):
        if not attempt and rank == 1:
            view.weights[0] = float("nan")
        try:
            program.save(folder, **attempt)
            messages.append("")
        except pb.errors.PibrochError as error:
            messages.append(str(error))
        channel.barrier()
    return messages


def save_once(channel, folder):
    program = Program(channel)
    program.train(1, 2)
    program.save(folder)


def dcp_parts(program):
    """Models and optimizers in DCP's checkpoints by torch's own tools, tables beside them."""
    model, optimizer = get_state_dict(program.model, program.optimizer)
    schedulers = {name: each.state_dict() for name, each in program.scheduler.items()}
    return {
        "rows": program.embeddings.stateful(),
        "model": model,
        "optimizer": optimizer,
        "schedulers": schedulers,
    }


def dcp_save(channel, folder, last, dropout=False, **options):
    program = Program(channel, **options)
    program.train(1, last, dropout)
    dcp.save(dcp_parts(program), checkpoint_id=folder)
    return program.numbers()


def dcp_resume(channel, folder, last, dropout=False, **options):
    """Into other initial numbers; what was loaded, and what came of the steps to ``last``."""
    program = Program(channel, seed=9, **options)
    parts = dcp_parts(program)
    dcp.load(parts, checkpoint_id=folder)
    set_state_dict(
        program.model,
        program.optimizer,
        model_state_dict=parts["model"],
        optim_state_dict=parts["optimizer"],
    )
    for name, each in program.scheduler.items():
        each.load_state_dict(parts["schedulers"][name])
    loaded = program.numbers()
    program.train(program.embeddings.step + 1, last, dropout)
    return loaded, program.numbers()


def gather_whole(channel, on_all_ranks, **options):
    """What `full_state_dict` gives after two steps, and the same through what this rank holds."""
    program = Program(channel, **options)
    program.train(1, 2, dropout=False)
    state = program.embeddings.full_state_dict(on_all_ranks=on_all_ranks, row_state=True)
    return {name: tensor.numpy() for name, tensor in state.items()}, program.numbers()


def fill_whole(channel, state, by_table, **options):
    """Rank 0 alone has the state."""
    program = Program(channel, seed=8, **options)
    state = {name: torch.from_numpy(array) for name, array in state.items()}
    for table in TABLES if by_table else [None]:
        some = {
            name: each for name, each in state.items() if table is None or f".{table.name}." in name
        }
        program.embeddings.load_full_state_dict(
            some if channel.ranks.rank == 0 else {}, strict=not by_table
        )
    one = program.embeddings.full_state_dict(["item"], on_all_ranks=True)
    assert (
        torch.equal(one.pop("embedding_bags.item.weight"), state["embedding_bags.item.weight"])
        and not one
    )
    return program.numbers()


def fill_badly(channel, state, **options):
    program = Program(channel, **options)
    messages = []
    state = {name: torch.from_numpy(array) for name, array in state.items()}
    first = next(iter(state))
    for bad in (
        {**state, first: state[first][1:]},
        {**state, "other": state[first]},
        {first: state[first]},
    ):
        try:
            program.embeddings.load_full_state_dict(bad if channel.ranks.rank == 0 else {})
        except pb.errors.CheckpointError as error:
            messages.append(str(error))
    return messages


def read_ahead(channel, folder, last, save_after, load_after=None, **options):
    """Batches come through a feed that reads ahead, which saving and loading interrupt.

    Returns the numbers at the end.
    """
    program = Program(channel, **options)
    rank = channel.ranks.rank
    size = channel.ranks.world_size
    batches = (
        batch_of(step, SIZE * rank // size, SIZE * (rank + 1) // size)
        for step in range(1, last + 1)
    )
    program.model.train(False)
    for batch in program.embeddings.feed(batches):
        program.step(batch)
        if program.embeddings.step == save_after:
            program.save(folder)
        if program.embeddings.step == load_after:
            program.load(folder)
            load_after = None
    return program.numbers()


def steps_after_load(channel, folder, steps):
    program = Program(channel, seed=5)
    program.load(folder)
    for step in steps:
        program.train(step, step, dropout=False)
    return program.numbers()


def resume_and_save(channel, folder, last, to, **options):
    """As `resume`, then saved; whole tables on rank 0, and the numbers."""
    program = Program(channel, seed=9, **options)
    saved = program.load(folder)
    program.train(saved.step + 1, last, dropout=False)
    program.save(to)
    state = program.embeddings.full_state_dict(row_state=True)
    return {name: tensor.numpy() for name, tensor in state.items()}, program.numbers()


class Towers(nn.Module):
    """A layer of all ranks, and towers that some ranks hold."""

    def __init__(self, held):
        super().__init__()
        self.bottom = nn.Linear(3, 3)
        self.towers = nn.ModuleDict({str(tower): nn.Linear(3, 2) for tower in held})


def towers(channel, folder, do):
    """Tower r is rank r's alone; rows of one process hold both. Weights and moments by name."""
    ranks = channel.ranks
    torch.manual_seed(7 if do == "save" else 8)
    model = Towers(range(2) if ranks.world_size == 1 else [ranks.rank])
    if ranks.world_size > 1:
        group = ranks.groups([[0], [1]])
        pb.data_parallel(model.towers[str(ranks.rank)], group, reduction="sum")
        pb.data_parallel(model, ranks, reduction="sum")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    options = (
        {"exchange": "alltoall", "channel": ranks.open_channel()} if ranks.world_size > 1 else {}
    )
    embeddings = pb.Embeddings(TABLES, OPTIMIZERS, **options)
    if do == "save":
        for name, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + 2 * name.startswith("towers.1"))
        optimizer.step()
        pb.save(folder, embeddings, model=model, optimizer=optimizer)
    else:
        pb.load(folder, embeddings, model=model, optimizer=optimizer)
    names = [name for name, _ in model.named_parameters()]
    results = {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}
    for place, fields in optimizer.state_dict()["state"].items():
        results |= {
            f"{names[place]}/{field}": value.numpy().copy() for field, value in fields.items()
        }
    return results


if __name__ == "__main__":
    import torch.distributed as dist

    from pibroch.collectives import Ranks

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    save_and_die(Ranks.joined(60).open_channel(), sys.argv[1], 9, int(sys.argv[2]))
