"""The whole model as one compiled package, which a C++ program runs without pibroch.

`torch.export` traces :class:`~pibroch.serve.whole_model.WholeModel`, and AOTInductor compiles it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from pathlib import Path

import torch
from rich.filesize import decimal
from torch import Tensor
from torch.export import Dim, ExportedProgram

from pibroch.errors import CheckpointError, ConfigError, MissingDependencyError
from pibroch.serve.export import SavedRows
from pibroch.serve.from_checkpoint import read_verified, version_of
from pibroch.serve.inputs import encoded_inputs
from pibroch.serve.whole_model import WholeModel
from pibroch.state.checkpoint_folder import find_checkpoint
from pibroch.state.delta_format import is_exported
from pibroch.state.export_format import WRITE_AGAIN
from pibroch.storage import new_file

logger = logging.getLogger(__name__)
OUTPUTS = ("score", "logit")
MAX_BYTES = 1 << 30
"""Most bytes of weights in a package.

Compiling holds them some four times in memory, and a program that loads a package twice.
"""
_SAMPLES = 3  # of the batch that is traced; its size is free in the package, as are numbers of ids


def refuse_aot(out: Path, overwrite: bool) -> None:
    """Raise unless a package can be compiled and written there.

    Raises:
        MissingDependencyError: without a C++ compiler.
        ConfigError: for an ``out`` that is taken, or not named as a package.
    """
    compiler = os.environ.get("CXX", "g++")  # as torch looks for it
    if shutil.which(compiler) is None:
        raise MissingDependencyError(
            f"--aot without the C++ compiler {compiler}",
            "one, which torch compiles the model with",
            "install it, such as by `apt-get install g++`, or name another one in CXX",
        )
    if out.suffix != ".pt2" or out.is_dir():
        raise ConfigError(
            f"{out} for --aot", "the name of a file that ends in .pt2", "choose one, as ctr.pt2"
        )
    if out.exists() and not overwrite:
        raise ConfigError(f"{out}, which exists", "a new file", "pass --overwrite to replace it")


def export_aot(
    checkpoint: Path,
    out: Path,
    overwrite: bool = False,
    min_count: int = 1,
    max_bytes: int = MAX_BYTES,
) -> tuple[str, WholeModel]:
    """Compile a checkpoint, or a run directory's best one, to a package, there whole or not at all.

    Takes half a minute, and some four times the memory of the tables. The package runs on
    processors that have the instructions of this one. All is computed in float32, also where the
    model computes in bfloat16.

    Args:
        checkpoint: its folder, or a run directory.
        out: the package, whose name ends in ``.pt2``.
        overwrite: replace one that is there already.
        min_count: of tables of raw ids, leave out ids that training counted less often.
        max_bytes: refuse more bytes of embedding tables.

    Returns:
        A name of the weights, and what was compiled.

    Raises:
        CheckpointError: for a checkpoint that is missing or damaged, and for an export.
        ConfigError: for an ``out`` that is taken, tables too large for a package, ids that are
            neither rows nor raw ones, and a model that cannot be traced.
        MissingDependencyError: without a C++ compiler.
        StorageError: when the disk refuses.
    """
    refuse_aot(out, overwrite)
    if is_exported(checkpoint):
        raise CheckpointError(
            f"{checkpoint}, an export, for --aot",
            "a checkpoint or a run directory",
            "name the one that it was made from",
        )
    folder = find_checkpoint(checkpoint)
    manifest = read_verified(folder)
    num_bytes = sum(4 * saved.num_rows * saved.dim for saved in manifest.tables.values())
    if num_bytes > max_bytes:
        raise ConfigError(
            f"{folder}, whose tables are {decimal(num_bytes)}, for --aot",
            f"at most {decimal(max_bytes)}, which a program loads into its memory",
            "serve an export, whose tables are mapped; or take --onnx, which has the dense layers",
        )
    logger.info("compiling %s with %s of tables", folder, decimal(num_bytes))
    model = WholeModel.of(SavedRows.of(folder, manifest, min_count))
    version = version_of(folder, manifest)
    _write(model, version, out)
    return version, model


def _write(model: WholeModel, version: str, out: Path) -> None:
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.utils import fresh_cache

    about = {
        "pibroch.version": version,
        "pibroch.inputs": json.dumps(encoded_inputs(model.schema)),
        "pibroch.outputs": json.dumps(OUTPUTS),
    }
    program = traced(model)
    # torch warns about parts of its own
    with (
        new_file(out, "a disk with room for the package", WRITE_AGAIN) as temporary,
        warnings.catch_warnings(action="ignore"),
        fresh_cache(),
    ):
        out.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            aoti_compile_and_package(
                program,
                package_path=file,
                inductor_configs={"aot_inductor.metadata": about},
            )


def traced(model: WholeModel) -> ExportedProgram:
    """The program of a model, for any number of samples above 0 and of ids.

    Raises:
        ConfigError: for layers that torch cannot trace.
    """
    samples = Dim("samples", min=1)
    inputs: list[Tensor] = []
    shapes: list[dict[int, Dim]] = []
    for each in encoded_inputs(model.schema):
        name = each["name"]
        kind = torch.float32 if each["datatype"] == "FP32" else torch.int64
        is_values = name.endswith(".values")
        made = torch.zeros(_SAMPLES, *each["shape"][1:], dtype=kind)
        inputs.append(made + 1 if name.endswith(".lengths") else made)
        shapes.append({0: Dim(f"ids{len(shapes)}", min=0) if is_values else samples})
    model.eval().requires_grad_(False)
    try:
        with warnings.catch_warnings(action="ignore"):
            return torch.export.export(model, tuple(inputs), dynamic_shapes=(tuple(shapes),))
    except Exception as error:  # torch has many kinds
        problem = str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
        raise ConfigError(
            f"a model {type(model.layers).__name__} that torch.export cannot trace: {problem}",
            "layers whose Python does not branch on values of tensors",
            "change the model, or serve an export by pibroch",
        ) from error
