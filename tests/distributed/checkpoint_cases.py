"""What each rank does in the tests of checkpoints.

A tiny run with the same batches at every number of ranks.
"""

import logging
import os
import resource
import signal
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

import pibroch as pb
from pibroch.collectives import data_parallel
from pibroch.collectives.agreement import on_first, together
from pibroch.collectives.world import World
from pibroch.data import EncodedDataset
from pibroch.data.loader import batch_of
from pibroch.embedding.row_marks import SAVED
from pibroch.models import build_model
from pibroch.state import checkpoint
from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.state.manifest import Progress
from pibroch.train.session import Session
from small_run import make_config

OPTIMIZERS = {
    "adagrad": pb.Adagrad(lr=0.1),
    "rowwise_adam": pb.RowWiseAdam(lr=0.05),
    "averaged": pb.Adam(lr=0.05, average=0.9),
}
BATCH_SIZE = 50
MIXED = {"C1": "column_wise", "C2": "replicated", "C3": "table_wise", "": "row_wise"}


class Run:
    """One rank's part of a run with its checkpoints."""

    def __init__(
        self,
        channel,
        data,
        folder,
        optimizer="adagrad",
        placement="row_wise",
        full_every=1,
        keep=9,
        seed=5,
    ):
        dataset = EncodedDataset.open(Path(data))
        tables = tables_of(data)
        exchange = {
            "exchange": "alltoall",
            "placement": placement,
            "channel": channel.ranks.open_channel(),
        }
        embeddings = pb.Embeddings(tables, OPTIMIZERS[optimizer], seed=seed, **exchange)
        torch.manual_seed(seed)
        model = build_model(
            "dlrm", len(dataset.schema.dense), len(tables), dim=4, bottom=(8,), top=(8,)
        )
        model = data_parallel(model, channel.ranks)
        dense_optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.session = Session(
            make_config(data),
            dataset,
            embeddings,
            model,
            dense_optimizer,
            averages=None,
            world=World(channel.ranks, channel),
        )
        self.channel = channel
        self.folder = CheckpointFolder(Path(folder), keep, full_every, channel)

    def train(self, first, last):
        """Steps ``first`` to ``last``, both included; the same batches at every number of ranks."""
        session = self.session
        rank = self.channel.ranks.rank
        size = self.channel.ranks.world_size
        for step in range(first, last + 1):
            samples = np.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
            own = samples[BATCH_SIZE * rank // size : BATCH_SIZE * (rank + 1) // size]
            batch = batch_of(session.dataset.split("train"), own, None)
            session.optimizer.zero_grad()
            logits = session.model(batch.dense, session.embeddings(batch))
            functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
            session.optimizer.step()

    def save(self, step):
        self.folder.save(self.session, Progress(step=step))

    def numbers(self):
        """This rank's pieces, and the dense weights."""
        pieces = [
            (v.piece, {"weight": v.weights.copy(), **copies(v.state)})
            for v in self.session.embeddings.pieces()
        ]
        return pieces, {
            name: tensor.numpy().copy() for name, tensor in self.session.model.state_dict().items()
        }


def copies(arrays):
    return {name: array.copy() for name, array in arrays.items()}


def begin_and_save(channel, data, folder, options):
    """Three steps and a checkpoint, then three more; what was saved, and what came of it."""
    run = Run(channel, data, folder, **options)
    run.folder.resume(run.session)
    run.train(1, 3)
    run.save(3)
    saved = run.numbers()
    run.train(4, 6)
    return saved, run.numbers()


def move_and_go_on(channel, data, folder, options):
    """Load what others saved, into other initial weights.

    What was loaded, and what came of three more steps.
    """
    run = Run(channel, data, folder, seed=6, **options)
    progress = run.folder.resume(run.session)
    loaded = run.numbers()
    run.train(progress.step + 1, 6)
    return loaded, run.numbers()


def tables_of(data):
    return [
        pb.Table(name, rows, 4) for name, rows in EncodedDataset.open(Path(data)).num_rows.items()
    ]


def load_and_save(channel, data, folder, target, options):
    """Load what others saved, and save it elsewhere."""
    run = Run(channel, data, folder, seed=6, **options)
    progress = run.folder.resume(run.session)
    CheckpointFolder(Path(target), 9, 1, channel).save(run.session, progress)
    return run.numbers()


def save_every_step(channel, data, folder, last, options):
    """From the latest checkpoint, train to step ``last`` and save after each."""
    run = Run(channel, data, folder, **options)
    progress = run.folder.resume(run.session)
    for step in range(progress.step + 1, last + 1):
        run.train(step, step)
        run.save(step)
    return run.numbers()


def fail_to_save(channel, data, folder, how, bad_rank):
    """Save, then fail to save on one rank, then save again; what the failure was on this rank."""
    run = Run(channel, data, folder, full_every=2)
    run.save(1)
    run.train(2, 2)
    if channel.ranks.rank == bad_rank and how == "nan":
        view = run.session.embeddings.pieces()[-1]
        row = np.flatnonzero(view.marks[SAVED])[0]
        kept = view.weights[row].copy()
        view.weights[row] = np.nan
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if channel.ranks.rank == bad_rank and how == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        run.save(2)
        message = None
    except pb.errors.PibrochError as error:
        message = type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    channel.barrier()  # rank 0 has cleaned up
    left = sorted(path.name for path in Path(folder).iterdir())
    if channel.ranks.rank == bad_rank and how == "nan":
        view.weights[row] = kept
    channel.barrier()
    run.save(2)
    return message, left


def try_to_resume(channel, data, folder):
    return what_resuming_says(Run(channel, data, folder))


def what_resuming_says(run):
    """The error, or the warnings of what was set aside, or ``None``."""
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("pibroch").addHandler(handler)
    try:
        run.folder.resume(run.session)
    except pb.errors.CheckpointError as error:
        return str(error)
    finally:
        logging.getLogger("pibroch").removeHandler(handler)
    return "; ".join(text for text in warnings if "damaged" in text) or None


def try_to_resume_with_each_file_damaged(channel, data, folder, files):
    """What resuming says while rank 0 has flipped one bit of a file, for each of ``files`` in turn.

    Whole again at the end.
    """
    run = Run(channel, data, folder)
    messages = []
    for number, path in enumerate(files):
        content = path.read_bytes()
        channel.barrier()
        if channel.ranks.rank == 0:
            position = (0, len(content) // 2, len(content) - 2)[number % 3]
            with path.open("r+b") as file:
                file.seek(position)
                file.write(bytes([content[position] ^ 1]))
        channel.barrier()
        messages.append(what_resuming_says(run))
        channel.barrier()
        if channel.ranks.rank == 0:
            for aside in folder.glob("*.damaged"):
                aside.rename(aside.with_suffix(""))
            path.write_bytes(content)
        channel.barrier()
    return messages


def die_while_saving(channel, data, folder, rank, where):
    """Save twice; in the second saving a rank ends itself with signal 9.

    That happens in the ``where``-th file that it flushes.
    """
    run = Run(channel, data, folder)
    run.train(1, 1)
    run.save(1)
    run.train(2, 2)
    calls = 0

    def flush(path):
        nonlocal calls
        calls += 1
        if channel.ranks.rank == rank and calls > where:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.flush_to_disk = flush
    run.save(2)


def work_together(channel, bad_rank, kind):
    """Work that fails on one rank.

    What each rank sees, and what all see of work that succeeds afterwards.
    """

    def work():
        if channel.ranks.rank == bad_rank and kind == "pibroch":
            raise pb.errors.DataError("a thing", "another", "change it")
        if channel.ranks.rank == bad_rank and kind == "bug":
            raise ZeroDivisionError("by zero")
        return channel.ranks.rank

    try:
        together(channel, work)
        message = None
    except Exception as error:
        message = type(error).__name__, str(error)
    return (
        message,
        together(channel, lambda: channel.ranks.rank),
        on_first(channel, lambda: channel.ranks.rank + 7),
    )


def begin_where_others_do_not_look(channel, data, folder):
    """Rank 1 is given another folder than the others, as if its disk were not shared."""
    run = Run(channel, data, Path(folder) / ("other" if channel.ranks.rank == 1 else "run"))
    try:
        run.save(1)
    except pb.errors.PibrochError as error:
        return type(error).__name__, str(error)
    return None
