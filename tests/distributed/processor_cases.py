"""What a trainer does in the tests of data processors."""

import os
import signal

import torch

from pibroch import rpc
from pibroch.data import EncodedDataset, Loader
from pibroch.errors import NotAllowedError, PibrochError
from pibroch.processors import Processors, client, serve
from pibroch.roles import DATA_PROCESSOR
from pibroch.roles.group import join, leave
from pibroch.servers import server


def same_batches(channel, rendezvous, path, split, batch_size, shuffle, part, skip, most_bytes):
    """Whether two epochs from processors are those of the loader, in every field.

    Also returns the most bytes of a batch.
    """
    dataset = EncodedDataset.open(path)
    here, wanted = (
        Loader(dataset.split(split), batch_size, shuffle=shuffle, seed=7, part=tuple(part))
        for _ in range(2)
    )
    client.MOST_BYTES = most_bytes
    processors = Processors(join(rendezvous, {DATA_PROCESSOR: 2}, 0)[DATA_PROCESSOR], channel.ranks)
    try:
        for _, _ in zip(range(skip), here, strict=False):
            continue
        wanted.load_state_dict(here.state_dict())
        num_batches = 2 * len(here) - skip
        batches = processors.batches(dataset, wanted, num_batches)
        for _ in range(num_batches):
            expected = next(iter(here))
            assert_same(next(batches), expected)
        assert next(batches, None) is None
    finally:
        leave()
    return processors.num_bytes


def assert_same(batch, expected):
    for name in ("dense", "values", "offsets", "labels"):
        ours = getattr(batch, name)
        other = getattr(expected, name)
        assert (
            ours.dtype == other.dtype and ours.shape == other.shape and torch.equal(ours, other)
        ), name
    for name in ("keys", "weights", "position", "first_sample"):
        assert getattr(batch, name) == getattr(expected, name), name
    batch.validate()


def problem_of(channel, rendezvous, path, configured_path, configured_digest, num_processors=2):
    """What is raised when processors are told of other data or another place.

    ``None`` when they give batches.
    """
    dataset = EncodedDataset.open(path)
    loader = Loader(dataset.split("train"), 10)
    dataset.path = type(dataset.path)(configured_path or path)
    dataset.digest = configured_digest or dataset.digest
    processors = Processors(
        join(rendezvous, {DATA_PROCESSOR: num_processors}, 0)[DATA_PROCESSOR], channel.ranks
    )
    try:
        next(processors.batches(dataset, loader, 3))
    except PibrochError as error:
        return type(error).__name__, str(error)
    finally:
        leave()


def problem_of_loss(channel, rendezvous, path, processes):
    """The error when processors are killed within an epoch and nobody takes their place."""
    client.COME_BACK_S = 0.5
    dataset = EncodedDataset.open(path)
    processors = Processors(
        join(rendezvous, {DATA_PROCESSOR: len(processes)}, 0)[DATA_PROCESSOR], channel.ranks
    )
    try:
        batches = processors.batches(dataset, Loader(dataset.split("train"), 10), 200)
        next(batches)
        for process in processes:
            os.kill(process, signal.SIGKILL)
        for _ in batches:
            pass
    except PibrochError as error:
        return type(error).__name__, str(error), error.is_loss
    finally:
        leave()


def serve_and_leave(rendezvous, number, opens):
    """Be a processor for a moment."""
    serve(rendezvous, number, opens)
    leave()


def problem_of_joining(channel, rendezvous, timeout_s=0.2):
    """What is raised when no processor comes; ``None`` when one is there."""
    try:
        join(rendezvous, {DATA_PROCESSOR: 1}, 0, timeout_s)
    except PibrochError as error:
        return type(error).__name__, str(error)
    leave()


def is_refused(channel, rendezvous):
    """Whether a processor runs no function of a server's, and nothing else but its own."""
    (name, _) = join(rendezvous, {DATA_PROCESSOR: 2}, 0)[DATA_PROCESSOR]
    refused = []
    try:
        for function in (server.start_marks, join, EncodedDataset.open):
            try:
                rpc.rpc_sync(name, function, ("x",))
            except NotAllowedError:
                refused.append(function)
    finally:
        leave()
    return len(refused) == 3
