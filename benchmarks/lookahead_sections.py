"""The sections of topic ``lookahead``: what each answers, and how it was measured.

Each is measured and written for itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """A section.

    Attributes:
        name: on the command line, and of its folder.
        title: of its page, with the paper's figure.
        how: it was measured; one sentence.
    """

    name: str
    title: str
    how: str


STEP_TIME = Section(
    "step_time",
    "Step time of DLRM (Fig. 9, 15)",
    "contenders take turns of ten steps, three rounds at each rate, on the same batches from the "
    "same weights, after as many "
    "untimed steps as are looked ahead",
)
MODELS = Section(
    "other_models",
    "Step time of other models (Fig. 10, 15)",
    "as step time, with 100 steps looked ahead; TorchRec trains the same models in plain torch, for"
    " it has none of them",
)
BREAKDOWN = Section(
    "time_breakdown",
    "Where a step's time goes (Fig. 2)",
    "each moment of a rank's training thread counts for the innermost of the parts that a worker"
    " records (three rounds of ten steps, 20 steps looked ahead); a part's times are means over the"
    " ranks, p20, p50 and p80 are over the steps; messages share the link, so what travels before"
    " the sums of dense gradients is waited for with them",
)
DESIGN = Section(
    "cache_design",
    "Cache designs (Fig. 7)",
    "exchange `lookahead` with each design of its cache in turn, three rounds of ten steps on the"
    " same batches, caches full",
)
DELAY = Section(
    "delayed_synchronisation",
    "Delayed synchronisation (Fig. 8)",
    "exchange `lookahead` with and without delayed synchronisation in turn, three rounds of ten"
    " steps on the same batches, caches full",
)
WIRE = Section(
    "wire",
    "What travels: 32 or 16 bits, compressed or not",
    "exchanges `lookahead` and `alltoall`, and the ideal, in turn: three rounds of ten steps at"
    " each rate, 100 steps ahead",
)
HOSTS = Section(
    "hosts",
    "Two and four hosts (Fig. 16a)",
    "contenders in turn, two rounds of ten steps, with 1024 samples a rank and 20 steps looked"
    " ahead; all hosts share this machine's cores, so with four of them computing takes longer, for"
    " the ideal as well: compare within a number of hosts",
)
BATCH = Section(
    "batch_size",
    "Batch size (Fig. 16b)",
    "contenders in turn on two hosts, two rounds of ten steps at each batch size, 20 steps looked"
    " ahead; the same processes measure all sizes, so `peak_mb` has what smaller ones left",
)
TABLE_3 = Section(
    "lookahead",
    "Length of the lookahead (Table 3)",
    "exchange `lookahead` with each length in turn, three rounds of ten steps after as many as are"
    " looked ahead",
)
SKEW = Section(
    "skew",
    "Skew (Fig. 18, 19)",
    "exchange `lookahead` and the ideal in turn, three rounds of ten steps on ids of each skew, 100"
    " steps looked ahead",
)
LOSS = Section(
    "loss",
    "Loss against synchronous training (Fig. 13)",
    "`lookahead` and `alltoall`, which is synchronous training, take the same steps from the same"
    " weights in turns of ten; a step's time counts from its first step on, filling the cache"
    " included, pauses between turns excluded",
)
ASSIGNED = Section(
    "assigned",
    "Samples where their rows are",
    "contenders in turn, three rounds of ten steps on real ids (Zipf ids where the sample is"
    " absent); `assigned` trains each sample of a global batch on the rank where most of its rows"
    " are, see docs/lookahead.md; with four hosts a rank has half as many samples; all hosts share"
    " this machine's cores, so compare within a number of hosts",
)
ORACLE = Section(
    "oracle",
    "The oracle alone (Fig. 17)",
    "Zipf ids of a global batch of two ranks, duplicates included, are made addresses and added,"
    " and one step is planned, in one process on one core while the window is full; sixteen steps"
    " are timed",
)
SECTIONS = {
    section.name: section
    for section in (
        STEP_TIME,
        MODELS,
        BREAKDOWN,
        DESIGN,
        DELAY,
        WIRE,
        HOSTS,
        BATCH,
        TABLE_3,
        SKEW,
        LOSS,
        ASSIGNED,
        ORACLE,
    )
}
