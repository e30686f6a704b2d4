"""What each rank does in the tests of modules that groups of ranks hold.

A model with two towers, each on some ranks alone.

Tower t takes block t of each sample. A rank sends the blocks of its samples to one member of each
group and has the outputs back; on the way back gradients become those of the mean over the global
batch.
"""

import torch
from checkpoint_cases import Run
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pibroch.collectives import Ranks, clip_grad_norm, data_parallel, ownership
from pibroch.errors import ConfigError
from pibroch.models import BatchNorm
from pibroch.state.manifest import Progress

GROUPS = {1: [[0]], 2: [[0], [1]], 4: [[0, 1], [3, 2]]}
STEPS = [(0, 1, 7, 1), (3, 0, 2, 4), (0, 0, 0, 0), (0, 0, 1, 0), (2, 2, 2, 2)]
"""Samples of each of four ranks: ragged, one, none, none at all."""
CLIP = 0.3


class Towers(nn.Module):
    """The towers of ``held`` out of two, between layers that all ranks hold."""

    def __init__(self, held):
        super().__init__()
        self.bottom = nn.Linear(4, 3)
        self.top = nn.Linear(7, 1)
        self.towers = nn.ModuleDict(
            {
                str(t): nn.Sequential(nn.Linear(3, 5), BatchNorm(5), nn.Tanh(), nn.Linear(5, 2))
                for t in held
            }
        )

    def forward(self, dense, blocks, route):
        low = self.bottom(dense).tanh()
        outputs = [
            back(self.towers[str(t)](rows)) if t is not None else back(rows)
            for t, rows, back in route(blocks)
        ]
        return self.top(torch.cat([low, *outputs], 1)).squeeze(1)


def route_here(blocks):
    """All towers in this process."""
    for t in range(2):
        yield t, blocks[:, t], lambda rows: rows


class Rows(torch.autograd.Function):
    """Rows to other ranks; their gradients are multiplied by ``scale`` on the way back."""

    @staticmethod
    def forward(ctx, rows, channel, going, coming, scale):
        ctx.channel = channel
        ctx.going = going
        ctx.coming = coming
        ctx.scale = scale
        return channel.all_to_all(rows.contiguous(), going, coming)

    @staticmethod
    def backward(ctx, grad):
        back = ctx.channel.all_to_all((grad * ctx.scale).contiguous(), ctx.coming, ctx.going)
        return back, None, None, None, None


def route_over(channel, tower, sizes):
    """The tower of this rank gets its block of the samples of every second rank.

    Its outputs go where these came from.
    """
    rank = channel.ranks.rank
    size = channel.ranks.world_size
    groups = GROUPS[channel.ranks.world_size]
    takers = [members[rank % len(members)] for members in groups]
    going = [sizes[rank] if p in takers else 0 for p in range(size)]
    my_group = groups[tower]
    coming = [sizes[p] if my_group[p % len(my_group)] == rank else 0 for p in range(size)]
    order = sorted(
        range(2), key=lambda t: takers[t]
    )  # towers in the order in which their ranks stand

    def route(blocks):
        send = torch.cat([blocks[:, t] for t in order])
        rows = Rows.apply(send, channel, going, coming, 1.0)

        def back(outputs):
            received = Rows.apply(outputs, channel, coming, going, sizes[rank] / max(1, sum(sizes)))
            parts = dict(
                zip(
                    order,
                    received.split(sizes[rank]) if sizes[rank] else [received, received],
                    strict=True,
                )
            )
            return torch.cat([parts[t] for t in range(2)], 1)

        yield tower, rows, back

    return route


def numbers(name, shape):
    """The same for a name everywhere."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)))) * 0.5


def build(ranks):
    """The model on this rank, which is not as it should be but on the first rank of each group.

    Returns it and its tower.
    """
    size = ranks.world_size
    if size == 1:
        model = Towers([0, 1])
        tower = None
    else:
        group = ranks.groups(GROUPS[size])
        tower = [group.members == tuple(members) for members in GROUPS[size]].index(True)
        model = Towers([tower])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_first = size == 1 or (group.rank if "towers" in name else ranks.rank) == 0
            parameter.copy_(numbers(name, parameter.shape) + (not is_first))
    if size > 1:
        data_parallel(model.towers[str(tower)], group, reduction="sum")
        assert data_parallel(model, ranks) is model
    return model, tower


class Training:
    """Steps of the same global batches on one, two or four ranks."""

    def __init__(self, channel):
        self.channel = channel
        ranks = channel.ranks
        self.model, self.tower = build(ranks)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05, eps=1e-3)
        self.averages = AveragedModel(
            self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
        )

    def step(self, step):
        """Gradients before they were clipped, those of the blocks, and the norm."""
        size = self.channel.ranks.world_size
        rank = self.channel.ranks.rank
        total = sum(STEPS[step])
        sizes = [sum(STEPS[step][p * 4 // size : (p + 1) * 4 // size]) for p in range(size)]
        generator = torch.Generator().manual_seed(step)
        whole = [
            torch.randn(total, 4, generator=generator),
            torch.randn(total, 2, 3, generator=generator),
        ]
        whole.append(torch.rand(total, generator=generator).round())
        dense, blocks, labels = (each[sum(sizes[:rank]) : sum(sizes[: rank + 1])] for each in whole)
        blocks = blocks.clone().requires_grad_()
        route = route_here if self.tower is None else route_over(self.channel, self.tower, sizes)
        self.optimizer.zero_grad()
        logits = self.model(dense, blocks, route)
        bce = functional.binary_cross_entropy_with_logits
        loss = bce(logits, labels) if len(labels) else logits.sum()
        loss.backward()
        gradients = {
            name: parameter.grad.clone() for name, parameter in self.model.named_parameters()
        }
        norm = clip_grad_norm(self.model, CLIP, self.channel)
        clipped = {
            name: parameter.grad.clone() for name, parameter in self.model.named_parameters()
        }
        self.optimizer.step()
        self.averages.update_parameters(self.model)
        return gradients, blocks.grad, clipped, norm.item()

    def state(self):
        """Model, averages and the optimizer's state by names."""
        names = [name for name, _ in self.model.named_parameters()]
        fields = self.optimizer.state_dict()["state"].items()
        state = {
            f"state {names[i]} {field}": value
            for i, named in fields
            for field, value in named.items()
        }
        averages = {f"average {name}": value for name, value in self.averages.state_dict().items()}
        return {
            name: value.clone()
            for name, value in {**self.model.state_dict(), **averages, **state}.items()
        }


def train(channel):
    training = Training(channel)
    return [training.step(step) for step in range(len(STEPS))], training.state()


def session_of(channel, data, folder):
    """A run with checkpoints, of which the dense layers are a training's."""
    run = Run(channel, data, folder)
    training = Training(channel)
    run.session.model = training.model
    run.session.optimizer = training.optimizer
    run.session.averages = training.averages
    return run, training


def save(channel, data, folder):
    """Two steps and a checkpoint, then two more."""
    run, training = session_of(channel, data, folder)
    for step in (0, 1):
        training.step(step)
    run.save(2)
    saved = training.state()
    for step in (2, 4):
        training.step(step)
    return saved, training.state()


def load(channel, data, folder):
    """Load it, and take the two steps that came after."""
    run, training = session_of(channel, data, folder)
    assert run.folder.resume(run.session) == Progress(step=2)
    loaded = training.state()
    for step in (2, 4):
        training.step(step)
    return loaded, training.state()


def mean_in_a_group(channel):
    """A module of two out of three ranks learns from the mean over these ranks' samples."""
    group = channel.ranks.group([2, 0])
    if group is None:
        return None
    module = nn.Linear(2, 1)
    nn.init.constant_(module.weight, float(group.rank + 1))
    data_parallel(module, group)
    x = torch.arange(6.0).view(3, 2)[: (1, 3)[group.rank]] + 10 * group.rank
    module(x).mean().backward()
    return module.weight.detach(), module.weight.grad


def wrong_parts(channel, how):
    """What ranks say of a model whose parts do not fit together."""
    ranks = channel.ranks
    model = nn.ModuleDict({"low": nn.Linear(2, 2)})
    group = ranks.groups([[0, 1], [2]])
    if how == "one name for two groups":
        model["tower"] = data_parallel(nn.Linear(2, 2), group)
    elif how == "a member without it" and ranks.rank == 0:
        model["tower"] = nn.Linear(2, 2)
        ownership.assign(model["tower"], (0, 1))
    elif how == "held by all elsewhere":
        model["tower"] = (
            nn.Linear(2, 2) if ranks.rank else data_parallel(nn.Linear(2, 2), ranks.group([0]))
        )
    try:
        data_parallel(model, ranks)
    except ConfigError as error:
        return str(error)
    return None


def alone():
    return Ranks.alone().open_channel()
