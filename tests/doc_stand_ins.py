"""What the blocks of the guides take from their reader's program.

Small tables, models, batches, runs and other processes.
"""

import multiprocessing
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import pibroch as pb
from pibroch import models as pb_models
from pibroch.data import Split
from pibroch.ports import free_port

CRITERION = nn.functional.binary_cross_entropy_with_logits
OF_BLOCKS: dict = {}
"""By page and number of the block.

A function that gives its names, which stand before those of all blocks.
"""


def for_block(page, *numbers):
    def register(function):
        OF_BLOCKS.update(dict.fromkeys([(page, number) for number in numbers], function))
        return function

    return register


def fresh(block, number):
    """The names that a block finds; each block gets new ones."""
    os.environ["MASTER_PORT"] = str(free_port())
    common = {
        "pb": pb,
        "torch": torch,
        "nn": nn,
        "np": np,
        "dist": dist,
        "partial": partial,
        "Path": Path,
    }
    common |= {"criterion": CRITERION}
    return common | OF_BLOCKS.get((block.page, number), dict)()


class Net(nn.Module):
    """Takes embeddings ``[B, F, D]``, or the function that gives them."""

    def __init__(self, num_inputs):
        super().__init__()
        self.top = nn.Linear(num_inputs, 1)
        self.towers = nn.ModuleDict({"left": nn.Linear(2, 2)})

    def forward(self, dense, embedded):
        embedded = embedded() if callable(embedded) else embedded
        return self.top(torch.cat([dense, embedded.flatten(1)], 1)).squeeze(1)


def batches(names, count=3, batch_size=8, num_rows=20):
    return [
        pb.JaggedBatch.from_one_hot(
            torch.rand(batch_size, 2),
            list(names),
            torch.randint(0, num_rows, (len(names), batch_size)),
            torch.randint(0, 2, (batch_size,)).float(),
        )
        for _ in range(count)
    ]


def training(names=("C1",), dim=4):
    """Tables, a model with its optimizer, and a loader."""
    model = Net(2 + len(names) * dim)
    optimizer = torch.optim.Adam(model.parameters())
    return {
        "tables": [pb.Table(name, 20, dim) for name in names],
        "model": model,
        "optimizer": optimizer,
        "dense_optimizer": optimizer,
        "loader": batches(names),
    }


@for_block("docs/towers.md", 0)
def towers():
    names = ("user", "age", "item", "shop")
    tower = lambda count: pb_models.LinearTower(count, 4, 2, 0, 1)  # noqa: E731
    model = Net(2 + 4 * 2)
    model.towers = pb_models.Towers([[0, 1], [2, 3]], tower)
    model.forward = lambda dense, embedded: Net.forward(model, dense, model.towers(embedded()))
    return training(names) | {"model": model, "batch": batches(names, 1)[0]}


@for_block("docs/hashed-tables.md", 0)
def raw_ids():
    return training(("user", "item"), 16)


@for_block("docs/lookahead.md", 0, 2)
@for_block("docs/distributed.md", 0)
def many_ranks():
    if dist.is_initialized():
        dist.destroy_process_group()
    return training(("C1", "country"))


@for_block("docs/lookahead.md", 1)
def a_split():
    ids = np.zeros((8, 1), np.int32)
    names = many_ranks()
    return names | {
        "split": Split("train", ("C1",), (), ids[:, 0], np.zeros((8, 0), np.float32), ids, {}),
        "embeddings": pb.Embeddings(names["tables"], pb.SGD(lr=0.1), pb.Local()),
        "rank": 0,
        "world_size": 1,
        "num_epochs": 2,
    }


@for_block("docs/distributed.md", 1)
def groups():
    return training() | {"name": "left"}


@for_block("docs/distributed.md", 2)
def placement():
    return training(("C1", "country")) | {"optimizer": pb.SGD(lr=0.1)}


@for_block("docs/retrieve.md", 0)
def retrieval():
    if dist.is_initialized():
        dist.destroy_process_group()
    names = training()
    pb.Plan.of(names["tables"], 1).save(Path("plan.json"))
    return names | {"plan": "plan.json", "batch": names["loader"][0]}


@for_block("docs/bounded-lag.md", 0)
def lagged_inference():
    names = training(("C1", "country"))
    saved = pb.Embeddings(names["tables"], pb.SGD(lr=1.0))
    pb.save("saved", saved, model=names["model"])
    written = {"write": lambda request_id, scores: None}
    return names | written | {"folder": "saved", "plan": "row_wise", "batches": names["loader"]}


@for_block("docs/bounded-lag.md", 1)
def backend():
    dist.destroy_process_group()
    return {
        "rows": torch.ones(3, 2),
        "out": torch.empty(3, 2),
        "input_splits": [3],
        "output_splits": [3],
    }


@for_block("docs/checkpoints.md", 0, 1)
def program():
    names = training(("item",))
    model = names["model"]
    optimizer = names["optimizer"]
    embeddings = pb.Embeddings(names["tables"], pb.Adagrad(lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    here = {
        "embeddings": embeddings,
        "model": model,
        "scheduler": scheduler,
        "batch": names["loader"][0],
    }
    return names | here | {"last": 2, "auc": 0.7, "optimizer": optimizer}


@for_block("docs/torch-tools.md", 0, 1, 2)
def torch_tools():
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    embeddings = pb.Embeddings([pb.Table("a", 6, 4)], pb.SGD(lr=0.1))
    net = nn.Linear(4, 1)
    model = nn.Sequential(embeddings, nn.Flatten(), net)
    here = {"embeddings": embeddings, "net": net, "model": model, "batch": batches("a", 1, 2, 6)[0]}
    averages = {"AveragedModel": AveragedModel, "get_ema_multi_avg_fn": get_ema_multi_avg_fn}
    return here | averages | {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}


def predicting():
    data, run = trained()
    run.rename(Path("runs/first").absolute())
    from pibroch.data import EncodedDataset, Loader

    return {"batch": next(iter(Loader(EncodedDataset.open(data).split("test"), 8)))}


@for_block("docs/data.md", 0)
def dataset():
    data, _ = trained()
    data.rename("data_of_tests")
    Path("data").mkdir()
    Path("data_of_tests").rename("data/criteo")
    return {}


@for_block("docs/serving.md", 0)
def serving():
    from pibroch.serve.export import export_checkpoint

    names = predicting()
    export_checkpoint(Path("runs/first"), Path("models/ctr"))
    return names


@for_block("docs/export.md", 0)
def scoring_elsewhere():
    """A session that scores nothing stands in for a runtime that is not installed."""
    from importlib.util import find_spec

    from pibroch.serve.dense_onnx import export_onnx

    serving()
    if all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")):
        export_onnx(Path("models/ctr"), Path("ctr.onnx"))
    else:
        session = SimpleNamespace(
            run=lambda outputs, inputs: (np.zeros(len(inputs["embedding"])),) * 2
        )
        sys.modules["onnxruntime"] = SimpleNamespace(InferenceSession=lambda path: session)
    return {"rows": [{"I1": 1, "C1": "00000001"}]}


@for_block("docs/export.md", 1)
def inputs_of_a_package():
    """Of the export that the block before it has."""
    return {"rows": [{"I1": 1, "C1": "00000001"}]}


@for_block("docs/serving.md", 1)
def asking():
    """A server at the port that the page names would meet with others.

    The client is told of another one.
    """
    import tritonclient.http as triton

    from served import serving

    server = serving(Path("models/ctr"))
    address = server.__enter__().address
    triton.InferenceServerClient = partial(_client_at, triton.InferenceServerClient, address)
    return {
        "_server": server,
        "dense": np.ones((1, 1), np.float32),
        "ids": np.ones((1, 1), np.int64),
    }


def _client_at(made, address, page_says):
    assert page_says == "127.0.0.1:8000"
    return made("{}:{}".format(*address))


def trained():
    """A dataset with Criteo's first dense and categorical column, and a run on it, as paths."""
    from pibroch.data.prepare import prepare
    from pibroch.data.schema import Schema
    from pibroch.data.sources import TextSource
    from small_run import make_config, train_here

    rows = [f"{i % 3 == 0:d},{i % 7},{i % 5:08x}\n" for i in range(600)]
    Path("clicks.csv").write_text("clicked,I1,C1\n" + "".join(rows))
    schema = {"name": "C1", "column": "C1"}, {"name": "I1", "column": "I1"}
    prepare(
        [TextSource(Path("clicks.csv"), ",", True)],
        Schema(label="clicked", categorical=(schema[0],), dense=(schema[1],)),
        Path("data").absolute(),
    )
    run, _ = train_here(
        make_config(Path("data").absolute(), "train.steps=3"), Path("runs/of_tests").absolute()
    )
    return Path("data"), run.path


@for_block("docs/moving-from-torchrec.md", 0)
def metrics():
    clicks = torch.tensor([0.0, 1.0, 1.0, 0.0])
    return {
        "logits": torch.randn(4, 2),
        "clicks": clicks,
        "bought": clicks * torch.tensor([0.0, 1.0, 0.0, 0.0]),
    }


@for_block("docs/planning.md", 0)
def profile():
    from pibroch.planner.profile import ProfileCounter

    counter = ProfileCounter({"C1": 20})
    counter.add({"C1": [np.arange(20)]}, 20)
    counter.profile(20, "nobody's").save(Path("criteo.profile"))
    return training()


class Layer(nn.Linear):
    """What the guide's second worker makes."""

    def __init__(self):
        super().__init__(2, 1)


def second_worker(name):
    from pibroch import rpc

    rpc.init_rpc(name, rank=1, world_size=2, rpc_backend_options=_allowing())
    rpc.shutdown()


def _allowing():
    from pibroch import rpc

    return rpc.RpcBackendOptions(allowed_modules=["doc_stand_ins"])


def beside(name):
    """Another worker; it ends when this process does."""
    worker = multiprocessing.get_context("fork").Process(
        target=second_worker, args=(name,), daemon=True
    )
    worker.start()
    return {"Layer": Layer, "batch": torch.ones(3, 2), "_worker": worker}


@for_block("docs/rpc.md", 0)
def first_program():
    """As the page says: the same program as worker 1, by its rank on the command line."""
    import doc_pages

    program = Path("two_workers.py")
    program.write_text(doc_pages.source_of(doc_pages.PYTHON["docs/rpc.md"][0]))
    sys.argv = ["two_workers.py", "0"]
    return {"_worker": subprocess.Popen([sys.executable, program, "1"])}


@for_block("docs/rpc.md", 1)
def gradients():
    from pibroch import rpc
    from pibroch.rpc import autograd, optim

    names = beside("server")
    rpc.init_rpc("trainer", rank=0, world_size=2, rpc_backend_options=_allowing())
    rref = rpc.remote("server", Layer)
    optimizer = optim.DistributedOptimizer(
        torch.optim.SGD, [rpc.RRef(nn.Parameter(torch.ones(1)))], lr=0.1
    )
    return names | {
        "autograd": autograd,
        "rref": rref,
        "labels": torch.ones(3, 1),
        "optimizer": optimizer,
    }
