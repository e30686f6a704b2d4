"""``pibroch doctor``: what this machine can do."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pibroch.cli.console import results
from pibroch.process import num_processors

_OK = "[green]yes[/green]"
_NO = "[yellow]no[/yellow]"
_BAD = "[bold red]failed[/bold red]"
_SIMD = ("avx512f", "avx512_bf16", "amx_bf16", "avx2", "fma", "sha_ni", "asimd", "sve")


_RUNS = {
    "one process": (),
    "alltoall, two ranks": ("--ranks", "2", "--set", "embedding.exchange.name=alltoall"),
    "lookahead, two ranks": ("--ranks", "2", "--set", "embedding.exchange.name=lookahead"),
}
"""Small runs that need what most runs need."""
_COMPILE_TIMEOUT_S = 600.0


def doctor(
    compile_: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="First train a few steps in each way, which compiles the kernels.",
        ),
    ] = False,
) -> None:
    """Say what this machine can do, and check that the kernels compute what they should."""
    if compile_:
        _compile()
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (*_software(), *_hardware(), *_exchanges(), *_optional_parts()):
        table.add_row(name, value)
    is_right, message = _check_kernels()
    table.add_row("kernels agree with their definitions", f"{_OK if is_right else _BAD}  {message}")
    results.print(table)
    if not is_right:
        raise typer.Exit(1)


def _compile() -> None:
    """Train a few steps in each way, all at once.

    A kernel that several need is compiled by the first.

    Raises:
        typer.Exit: when one fails or takes longer than ten minutes.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pibroch-") as folder, ExitStack() as running:
        train = [sys.executable, "-m", "pibroch", "train", "--set", "train.steps=3"]
        runs = {
            name: running.enter_context(
                subprocess.Popen(
                    [*train, *more, "--run-dir", str(Path(folder) / str(number))],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            for number, (name, more) in enumerate(_RUNS.items())
        }
        try:
            for name, run in runs.items():
                left = max(0.0, started + _COMPILE_TIMEOUT_S - time.monotonic())
                output, _ = run.communicate(timeout=left)
                if run.returncode:
                    results.print(f"{name}: {output[-2000:]}", markup=False)
                    raise typer.Exit(1)
                results.print(f"compiled for {name}, {time.monotonic() - started:.0f} s")
        except subprocess.TimeoutExpired:
            results.print(f"not compiled within {_COMPILE_TIMEOUT_S:g} s", markup=False)
            raise typer.Exit(1) from None
        finally:
            for run in runs.values():
                run.terminate()


def _software() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for package in ("pibroch", "torch", "numba", "numpy", "polars", "safetensors"):
        yield package, _version_of(package) or _NO


def _hardware() -> Iterator[tuple[str, str]]:
    import torch

    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    yield "platform", platform.platform()
    yield "processors this process may use", str(num_processors())
    yield "threads for kernels and dense layers", str(torch.get_num_threads())
    yield "SIMD", " ".join(flag for flag in _SIMD if flag in flags) or "unknown"
    yield "memory", f"{_memory()}, limit of this process group {_memory_limit()}"
    yield "free disk here", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB"
    shared = Path("/dev/shm")
    has_room = f"{shutil.disk_usage(shared).free / 2**30:.1f} GiB" if shared.exists() else _NO
    yield "shared memory", has_room
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield "GPU", ", ".join(gpus) or _NO


def _exchanges() -> Iterator[tuple[str, str]]:
    from pibroch.config.exchange import exchanges

    for name, spec in exchanges().items():
        yield f"exchange {name}", spec.summary


def _optional_parts() -> Iterator[tuple[str, str]]:
    yield "triton (GPU kernels)", _version_of("triton") or _NO
    yield (
        "TensorBoard",
        _version_of("tensorboard") or f"{_NO}  pip install 'pibroch\\[tensorboard]'",
    )
    yield (
        "network namespaces (lab of several hosts)",
        _OK if _can_make_namespaces() else f"{_NO}  needs root",
    )


def _check_kernels() -> tuple[bool, str]:
    """The self-check in figures."""
    from pibroch.cli.self_check import largest_kernel_error

    started = time.perf_counter()
    worst = largest_kernel_error()
    return worst < 1e-5, f"largest difference {worst:.1e}, {time.perf_counter() - started:.1f} s"


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _memory() -> str:
    if not hasattr(os, "sysconf"):
        return "unknown"
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"


def _memory_limit() -> str:
    path = Path("/sys/fs/cgroup/memory.max")
    text = path.read_text().strip() if path.exists() else "max"
    return "none" if text == "max" else f"{int(text) / 2**30:.1f} GiB"


def _can_make_namespaces() -> bool:
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    attempt = subprocess.run(
        [unshare, "--net", "true"], capture_output=True, timeout=10, check=False
    )
    return attempt.returncode == 0
