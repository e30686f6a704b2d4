"""What each rank does in the tests of the exchange by towers.

Steps of a model with towers, and what they sent.
"""

from collections import Counter

import torch
from torch.nn import functional

import pibroch as pb
from pibroch.collectives import data_parallel
from pibroch.errors import ConfigError
from pibroch.exchange import place_towers
from pibroch.models import build_model

DIM = 8
BATCH = 24
FEATURES = ("a", "b", "c", "d", "e", "f")
GROUPS = (("d", "a"), ("f", "b", "e"), ("c",))  # uneven, in no order, one of a single feature


def batch_of(step, size, world, rank, one_hot=False):
    """This rank's part of a global batch.

    Parts are ragged, and rank 1's of every third step is empty.
    """
    generator = torch.Generator().manual_seed(step)
    dense = torch.randn(size, 3, generator=generator)
    labels = torch.rand(size, generator=generator).round()
    lengths = torch.ones(len(FEATURES), size, dtype=torch.int64)
    if not one_hot:
        lengths = torch.randint(0, 4, (len(FEATURES), size), generator=generator)
    ids = [torch.randint(0, 30, (int(n),), generator=generator) for n in lengths.flatten()]
    bounds = [size * r // world for r in range(world + 1)]
    if world > 2 and step % 3 == 2:
        bounds[1] = bounds[2]
    own = range(bounds[rank], bounds[rank + 1])
    chosen = [ids[f * size + b] for f in range(len(FEATURES)) for b in own]
    offsets = torch.tensor([0, *map(len, chosen)]).cumsum(0)
    values = torch.cat([torch.empty(0, dtype=torch.int64), *chosen])
    part = slice(own.start, own.stop)
    return pb.JaggedBatch(dense[part], FEATURES, values, offsets, labels[part])


class Job:
    """A model, its tables, and plain SGD for both."""

    def __init__(
        self,
        channel,
        name="tower_dlrm",
        groups=GROUPS,
        width=4,
        dim=DIM,
        combined=1,
        dense=True,
        **options,
    ):
        self.channel = channel
        ranks = channel.ranks
        options |= {"groups": groups} if options["exchange"] == "towers" else {}
        tables = [pb.Table(feature, 30, dim, initializer=pb.Normal(0.3)) for feature in FEATURES]
        self.embeddings = pb.Embeddings(
            tables, pb.SGD(lr=0.05), seed=1, channel=ranks.open_channel(), **options
        )
        torch.manual_seed(2)
        towers = {
            "groups": groups,
            "width": width,
            "combined": combined,
            "pass_through": width is None,
        }
        self.model = build_model(
            name, 3, len(FEATURES), FEATURES, dim=dim, bottom=(8,), top=(8,), towers=towers
        )
        self.model = place_towers(self.model, self.embeddings)
        if dense:
            self.model = data_parallel(self.model, ranks)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def part(self, step, size=BATCH, one_hot=False):
        return batch_of(step, size, self.channel.ranks.world_size, self.channel.ranks.rank, one_hot)

    def step(self, batch):
        """The logits of a step, and its loss."""
        self.optimizer.zero_grad()
        logits = self.model(batch.dense, lambda: self.embeddings(batch))
        bce = functional.binary_cross_entropy_with_logits
        loss = bce(logits, batch.labels) if batch.batch_size else logits.sum()
        loss.backward()
        self.optimizer.step()
        return logits.detach(), loss.item() * batch.batch_size

    def rows(self):
        return [
            (v.piece.table.name, v.piece.rows, v.piece.columns, v.weights.copy())
            for v in self.embeddings.pieces()
        ]


def train(channel, num_steps, name, **options):
    """Logits of the first steps and losses of all; dense layers; rows."""
    job = Job(channel, name, **options)
    logits = []
    losses = []
    for batch in job.embeddings.feed(job.part(step) for step in range(num_steps)):
        result, loss = job.step(batch)
        logits += [result] if len(logits) < 3 else []
        losses.append(loss)
    with torch.no_grad():  # evaluation between steps
        logits.append(job.model.eval()(job.part(5).dense, lambda: job.embeddings(job.part(5))))
    return (
        logits,
        losses,
        {name: t.clone() for name, t in job.model.state_dict().items()},
        job.rows(),
    )


def traffic(channel, batch_size, per_host=1, **options):
    """Bytes of a step that went to other hosts, by the counters of traffic.

    Those of the exchange by purpose; dense tensors.
    """
    job = Job(channel, **options)
    here = channel.ranks.rank // per_host
    batch = job.part(0, batch_size * channel.ranks.world_size, one_hot=True)
    before = Counter(channel.ranks.traffic.sent_to)
    job.step(batch)
    job.embeddings.exchange.flush()
    sent = Counter(channel.ranks.traffic.sent_to)
    sent.subtract(before)
    across = sum(count for rank, count in sent.items() if rank // per_host != here)
    purposes = dict(job.embeddings.exchange.report().bytes_by_purpose)
    return across, purposes, {name: p.numel() for name, p in job.model.named_parameters()}


def wrong(channel, exchange_groups=None, tables=None, **options):
    """What is said on each rank: of a model with its own groups, or of tables alone."""
    options |= {"exchange": "towers", "ranks_per_host": 1} | options
    try:
        if tables is not None:
            pb.Embeddings(tables, pb.SGD(lr=0.1), channel=channel.ranks.open_channel(), **options)
        elif exchange_groups is not None:
            made = [pb.Table(feature, 30, DIM) for feature in FEATURES]
            embeddings = pb.Embeddings(
                made,
                pb.SGD(lr=0.1),
                channel=channel.ranks.open_channel(),
                groups=exchange_groups,
                **options,
            )
            towers = {"groups": GROUPS}
            place_towers(
                build_model("tower_dlrm", 3, len(FEATURES), FEATURES, dim=DIM, towers=towers),
                embeddings,
            )
        else:
            Job(channel, **options)
    except ConfigError as error:
        return str(error)
    return None
