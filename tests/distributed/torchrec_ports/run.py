"""run.py FOLDER SYSTEM [PACKAGES]: the programs of one system, one after the other, on one rank."""

import importlib
import sys

import shared

if len(sys.argv) > 3:
    sys.path.append(sys.argv[3])  # where TorchRec lies, for its models
rank, world = shared.join()
for name in (
    "dlrm",
    "two_tower",
    "bert4rec",
    *(["objects"] if sys.argv[2] == "pibroch" and world == 1 else []),
):
    importlib.import_module(f"{name}_{sys.argv[2]}").run(rank, world)
