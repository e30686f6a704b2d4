"""Mutated exports, deltas, checkpoints and plans.

Refused in words or the same scores, no signal, no hang.

``PIBROCH_SOAK_MUTATIONS=1000`` is the whole measurement.
"""

import collections
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import pibroch as pb
from pibroch.serve.delta import export_delta
from pibroch.serve.export import ExportOptions, export_checkpoint
from row_plans import random_plan
from small_run import make_config, train_here

KINDS = ("export", "delta", "checkpoint", "program", "plan")
EACH = int(os.environ.get("PIBROCH_SOAK_MUTATIONS", "60")) // len(KINDS)
LIMIT_S = 60  # for one, on a machine that does much else
START_S = 120
SCRIPT = Path(__file__).parents[2] / "mutated_folders.py"


def program(folder):
    embeddings = pb.Embeddings([pb.Table("a", 9, 4)], pb.Adagrad(lr=0.1))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return pb.save(folder, embeddings, **parts, extra={"x": (1, 2)})


@pytest.fixture(scope="module")
def originals(clicks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    config = make_config(clicks.data, "train.steps=20", "train.checkpoint_every=10")
    run, _ = train_here(config, folder / "run")
    first, last = (run.path / "checkpoints" / f"step-{step:08d}" for step in (10, 20))
    export_checkpoint(last, folder / "export", ExportOptions("int8", shard_bytes=2000))
    export_checkpoint(first, folder / "delta" / "1")
    export_delta(last, folder / "delta" / "1", folder / "delta" / "2")
    (folder / "plan").mkdir()
    tables = [pb.Table("a", 9, 4), pb.Table("b", 40, 4)]
    random_plan(tables, 3, 1, copies=True).save(folder / "plan" / "plan")
    return {
        "export": folder / "export",
        "delta": folder / "delta",
        "checkpoint": last,
        "program": program(folder / "program"),
        "plan": folder / "plan",
    }


def outcomes(kind, folder, first, stop):
    """What a child process says of mutations from ``first`` on.

    It ends with the first that hangs it or ends it.
    """
    command = [sys.executable, SCRIPT, kind, folder, str(first), str(stop)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        ready = select.poll()  # takes descriptors of any number
        ready.register(child.stdout, select.POLLIN | select.POLLHUP)
        received = b""
        number = first
        limit_s = START_S
        deadline = time.monotonic() + limit_s
        while number < stop:
            is_there = ready.poll(1000 * max(0, deadline - time.monotonic()))
            chunk = os.read(child.stdout.fileno(), 1 << 16) if is_there else b""
            if not chunk:
                child.kill()
                rest = child.communicate()[1].decode()[-300:]
                yield number, f"hangs {rest}" if not is_there else f"ends {child.wait()} {rest}"
                return
            received += chunk
            *lines, received = received.split(b"\n")
            for line in lines:
                deadline = time.monotonic() + LIMIT_S
                word = line.decode().partition(" ")[2]
                if word != "begins":
                    yield number, word
                    number += 1


@pytest.mark.parametrize("kind", KINDS)
def test_refused_in_words_or_the_same(originals, kind):
    counts = collections.Counter()
    faults = {}
    number = 0
    while number < EACH:
        for at, message in outcomes(kind, originals[kind], number, EACH):
            counts[message.partition(" ")[0]] += 1
            if message.partition(" ")[0] not in ("same", "other", "refused"):
                faults[at] = message
            if message.startswith("refused") and "need" not in message:
                faults[at] = f"says no need: {message}"
            number = at + 1
    print(f"{kind}: {dict(counts)}")
    assert not faults, f"{len(faults)} of {EACH}: {faults}"
