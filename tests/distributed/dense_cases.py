"""What each rank does in the tests of dense layers over ranks."""

import contextlib
import copy
import gc
import operator
import os
import pickle
import time
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from pibroch.collectives import Ranks, data_parallel
from pibroch.collectives.ranks import Channel
from pibroch.errors import ConfigError, TrainingError
from pibroch.models import BatchNorm, build_model, set_place

NUM_STEPS = 3
PARTS = {1: (9,), 2: (8, 1), 3: (6, 0, 3), 4: (0, 1, 7, 1)}
"""Samples of each rank: ragged, one and none."""
OPTIONS = {
    "dim": 3,
    "bottom": (8,),
    "top": (9, 7),
    "dropout": 0.2,
    "embedding_dropout": 0.1,
    "batch_norm": True,
}


def batch(name, step):
    """Dense features, embeddings and labels of the global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    width = 3 + (name in ("deepfm", "wide_deep"))
    embedded = torch.randn(9, 5, width, generator=generator)
    return (
        torch.randn(9, 4, generator=generator),
        embedded,
        torch.rand(9, generator=generator).round(),
    )


def train(name, ranks, part):
    """Train on ``part`` of each global batch.

    Returns logits and embeddings' gradients of each step, and what was learned.
    """
    torch.manual_seed(ranks.rank)  # all start as rank 0 does
    model = data_parallel(build_model(name, 4, 5, **OPTIONS), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = []
    for step in range(NUM_STEPS):
        dense, embedded, labels = (tensor[part] for tensor in batch(name, step))
        embedded = embedded.clone().requires_grad_()
        set_place(model, 1, step, part.start)
        logits = model(dense, embedded)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        functional.binary_cross_entropy_with_logits(logits, labels).backward()
        gradients = {n: parameter.grad.clone() for n, parameter in model.named_parameters()}
        steps.append((logits.detach(), embedded.grad * (len(labels) / 9), gradients))
        optimizer.step()
    return steps, model.state_dict()


def train_part(channel, name):
    rank = channel.ranks.rank
    sizes = PARTS[channel.ranks.world_size]
    return train(name, channel.ranks, slice(sum(sizes[:rank]), sum(sizes[: rank + 1])))


class Odd(nn.Module):
    """Tied, frozen and unused layers, several types, and a layer that only some samples need."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.narrow = nn.Linear(6, 6).bfloat16()
        self.wide = nn.Linear(6, 6).double()
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.rare = nn.Linear(6, 6)
        self.later_frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x, rare):
        x = self.frozen(self.first(x)).tanh()
        x = (
            self.tied(self.later_frozen(x))
            + self.narrow(x.bfloat16()).float()
            + self.wide(x.double()).float()
        )
        return self.rare(x) if rare else x


def odd_gradients(ranks, sizes, part):
    """Gradients after two backwards without clearing, then after one more of each way of clearing.

    The rare layer is used by part 0 alone; a part without samples has gradients that are not
    numbers.
    """
    torch.manual_seed(ranks.rank)
    model = data_parallel(Odd(), ranks)
    model.later_frozen.requires_grad_(False)
    x = torch.randn(3, sum(sizes), 6, generator=torch.Generator().manual_seed(5))
    own = slice(sum(sizes[:part]), sum(sizes[: part + 1]))
    results = []
    for clearing in (None, True, False):
        if clearing is not None:
            model.zero_grad(set_to_none=clearing)
        for step in range(2 if clearing is None else 1):
            loss = model(x[step, own], part == 0).square().sum(1).mean()
            loss = (
                loss
                if sizes[part]
                else loss + sum((p * torch.nan).sum() for p in model.first.parameters())
            )
            loss.backward()
        results.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        )
    return results


def odd(channel, sizes):
    return odd_gradients(channel.ranks, sizes, channel.ranks.rank)


def unequal_models(channel):
    width = 3 if channel.ranks.rank == 0 else 4
    try:
        data_parallel(nn.Linear(2, width), channel.ranks)
    except ConfigError as error:
        return str(error)
    return None


def start(channel):
    """What a model holds after it was joined: numbers of all types, from rank 0, bit for bit."""
    torch.manual_seed(channel.ranks.rank)
    model = nn.Module()
    for place, dtype in enumerate(
        (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
    ):
        model.register_buffer(f"buffer_{place}", (torch.randn(3, 2) * 9).to(dtype))
    model.register_buffer("scalar", torch.tensor(float(channel.ranks.rank) - 0.0), persistent=False)
    model.register_buffer("nothing", torch.empty(0))
    model.weight = nn.Parameter(torch.randn(4, 5).T)
    data_parallel(model, channel.ranks)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class RecordingRanks(Ranks):
    """Notes when sums are started."""

    events: list

    def open_channel(self):
        events = self.events

        class Recording(Channel):
            def all_reduce(self, tensor):
                events.append("sum")
                return super().all_reduce(tensor)

        return Recording(self)


def order_of_events(channel):
    ranks = RecordingRanks(channel.ranks.rank, channel.ranks.world_size)
    ranks.events = []
    model = data_parallel(build_model("dlrm", 13, 26, dim=64), ranks)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: ranks.events.append(name.split(".")[0])
        )
    model(torch.randn(4, 13), torch.randn(4, 26, 64)).sum().backward()
    return ranks.events


def copies(channel):
    """Copies of the model go their own way, and neither evaluation nor a failed backward confuses
    the next step.
    """
    torch.manual_seed(0)
    model = data_parallel(
        nn.Sequential(nn.Linear(4, 4), BatchNorm(4), nn.Linear(4, 1)), channel.ranks
    )
    x = torch.randn(5, 4) + channel.ranks.rank
    other = copy.deepcopy(model).eval()
    third = pickle.loads(pickle.dumps(model))
    third(x[:3]).sum().backward()
    model.eval()
    with torch.inference_mode():
        if channel.ranks.rank == 0:
            other(x), model(x[:2])
    model.train()
    out = model(x)
    out.register_hook(_fail)
    with contextlib.suppress(ValueError):
        out.sum().backward()
    model(x).mean().backward()
    return (
        [parameter.grad for parameter in model.parameters()],
        [parameter.grad for parameter in other.parameters()],
        [parameter.grad is not None for parameter in third.parameters()],
    )


def _fail(gradient):
    raise ValueError


def far_from_zero(channel):
    """Columns with means a thousand times their deviation, and what the norm makes of them."""
    size = channel.ranks.world_size
    rank = channel.ranks.rank
    norm = data_parallel(BatchNorm(3), channel.ranks)
    x = torch.randn(4 * size, 3, generator=torch.Generator().manual_seed(1)) + torch.tensor(
        [0.0, 1e3, -3e3]
    )
    return x, norm(x[4 * rank : 4 * rank + 4]).detach()


def few_samples(channel, num_samples):
    """Batch norm passes a global batch of none or one sample by its running statistics.

    The sample is the last rank's.
    """
    norm = data_parallel(BatchNorm(3), channel.ranks)
    is_last = channel.ranks.rank == channel.ranks.world_size - 1
    x = torch.full((num_samples if is_last else 0, 3), 2.0)
    return norm(x).detach(), norm.state_dict()


PASSES = [(2, 0), (1, 3), (0, 0), (4, 1)]
"""Samples of each of two ranks: of one alone, ragged, none at all."""


def passes(channel, order, reduction="mean"):
    """Gradients of several passes, of which none is cleared, and those that one process has.

    Args:
        order: "in turn" for a backward after each call, "calls first" for all calls, and then
            backwards from the last one.
        reduction: with "sum", losses are weighted before.
    """
    rank = channel.ranks.rank
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    alone = copy.deepcopy(model)
    data_parallel(model, channel.ranks, reduction)
    parts = [[torch.randn(count, 2) for count in sizes] for sizes in PASSES]
    losses = []
    for x in parts:
        if any(map(len, x)):
            alone(torch.cat(x)).square().mean().backward()
        share = 1 if reduction == "mean" else len(x[rank]) / max(1, sum(map(len, x)))
        losses.append(model(x[rank]).square().mean().nan_to_num() * share)
        if order == "in turn":
            losses.pop().backward()
    while losses:
        losses.pop().backward()
    return [[p.grad for p in each.parameters()] for each in (model, alone)]


def two_calls_in_one_pass(channel, sizes):
    """What is said of one backward through two calls, gradients before and after, and those of the
    next step.
    """
    model = data_parallel(nn.Linear(2, 1), channel.ranks)
    x = torch.ones(9, 2) + channel.ranks.rank
    message = None
    model(x).mean().backward()
    before = model.weight.grad.clone()
    first, second = (model(x[:count]).mean() for count in sizes[channel.ranks.rank])
    try:
        (first + second).backward()
    except TrainingError as error:
        message = str(error)
    after = model.weight.grad.clone()
    model(x).mean().backward()
    return message, before, after, model.weight.grad


def later_layers(channel, how):
    """Errors for layers that are trained later, and gradients once they are the model's."""
    torch.manual_seed(channel.ranks.rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(how != "thawed")
    data_parallel(model, channel.ranks)
    if how == "thawed":
        model.requires_grad_(True)
    elif how == "added":
        model.append(nn.Linear(2, 2))
    else:
        model[0].weight = nn.Parameter(torch.randn(2, 2))
    x = torch.randn(3 + channel.ranks.rank, 2)
    message = None
    try:
        model(x)
    except ConfigError as error:
        message = str(error)
    data_parallel(model, channel.ranks)
    model(x).square().mean().backward()
    got = {name: p.grad for name, p in model.named_parameters()}
    alone = copy.deepcopy(model)
    alone.zero_grad()
    everything = torch.cat(channel.gather_tensors(x))
    alone(everything).square().mean().backward()
    return message, got, {name: p.grad for name, p in alone.named_parameters()}


def part_of_its_own(channel):
    """Gradients of a part that is data-parallel before the model is, and how many sums each
    backward takes.
    """
    torch.manual_seed(0)
    ranks = RecordingRanks(channel.ranks.rank, channel.ranks.world_size)
    ranks.events = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    alone = copy.deepcopy(model)
    data_parallel(model[0], ranks)
    data_parallel(model, ranks)
    data_parallel(model, ranks)
    model(torch.ones(1, 2)).mean().backward()
    alone(torch.ones(1, 2)).mean().backward()
    return ranks.events, [[p.grad for p in each.parameters()] for each in (model, alone)]


def dropped(channel):
    """Whether a model is freed, and threads and descriptors before, with and after it."""
    counts = [_threads_and_descriptors()]
    model = data_parallel(nn.Sequential(nn.Linear(2, 2), BatchNorm(2)), channel.ranks)
    model(torch.ones(2, 2)).sum().backward()
    counts.append(_threads_and_descriptors())
    parameter = weakref.ref(model[0].weight)
    channel.barrier()
    del model
    return parameter() is None, _settles_at(counts[0]), counts


def _threads_and_descriptors():
    return [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]


def _settles_at(most):
    """Whether there soon are no more; the system shows a thread that has ended for a while."""
    deadline = time.monotonic() + 10
    while not (settled := all(map(operator.le, _threads_and_descriptors(), most))):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return settled


def train_in_rounds(rank, port):
    """Join, train and leave again and again, as a job does whose group changes.

    Nothing may stay.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    counts = []
    for number in range(4):
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=2
        )
        model = data_parallel(nn.Linear(2, 1))
        model(torch.ones(2, 2)).sum().backward()
        dist.barrier()
        del model
        dist.destroy_process_group()
        gc.collect()
        counts.append(_threads_and_descriptors())
    os._exit(not _settles_at(counts[1]))
