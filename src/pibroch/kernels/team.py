"""Kernels on the threads that torch computes with.

One OpenMP team for both, entered without Python.

A team of our own beside torch's would stall it, and be stalled, wherever both want the same cores;
threads of Python would each need the interpreter's lock, one after the other, before they start.
torch's library depends on the OpenMP that it was built with, and both GNU's and LLVM's have the
entry point ``GOMP_parallel``, so compiled code can call that one's.

Measured on two cores, two threads for a kernel of 9 us a thread: 10 us, and 65 to 90 us by standing
Python threads; right after a product of matrices (caches cold, torch's threads asleep) 110 to 140
and 215 us; eight threads 76 and 191 us.

OpenMP gives each calling thread a team of its own, the one with which torch computes there, too. A
thread beside the main one is as quick with its team as the main thread (a kernel of 1.3 ms: 0.65 to
0.71 ms, 0.74 to 0.79 by standing threads). Several at once would want each core several times, so
one of them at a time has its team and the others work alone (:mod:`pibroch.kernels.parallel`): two
and four threads that did kernels of 90 us did 16,000 and 18,000 a second so, 14,000 and 15,000 each
with a team, 10,000 by the standing threads that they share. Our own threads beside a trainer
(`OURS`) have no team: with more threads than cores OpenMP's no longer spin, and the trainer would
wake its own in each operation.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher
from numba.core.errors import TypingError
from numba.extending import intrinsic

from pibroch.kernels.policy import kernel as compiled

ENTRIES = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
PREFIX = "pibroch_team_"  # of the names by which compiled code knows torch's OpenMP
FAILED = np.iinfo(np.int64).min
OURS = ("pibroch-", "rpc-")  # how the names of threads begin that serve the exchange and RPC
_is_lost = False  # in a forked process
_is_promised = False  # that OpenMP has computed nothing before a fork
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_ADDRESS = ir.IntType(8).as_pointer()


@lru_cache(maxsize=1)
def is_there() -> bool:
    """Whether torch's threads can be had; makes their entry points known to compiled code."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        addresses = {
            name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in ENTRIES
        }
    except (OSError, AttributeError):
        return False  # not Linux, or a build without OpenMP
    for name, address in addresses.items():
        llvm.add_symbol(PREFIX + name, address)
    return True


def can_run(kernel: Callable[..., Any]) -> bool:
    """Whether a kernel can run on the calling thread's team.

    A compiled kernel can, in any thread but the team's own.

    Not in a forked process: OpenMP would wait for threads that are not there where the parent,
    torch included, has used them.
    """
    is_ours = threading.current_thread().name.startswith(OURS)
    return isinstance(kernel, Dispatcher) and not is_ours and not _is_lost and is_there()


def run(kernel: Callable[..., Any], bounds: list[int], *args: Any) -> list[int]:
    """Call ``kernel(*args, bounds[i], bounds[i + 1])`` for each i, on one thread of the team each.

    Returns:
        What the kernel returned for each range, an integer; 0 for kernels that return nothing.

    Raises:
        MemoryError: when a kernel could not allocate what it needs, the only error that kernels
            know.
    """
    results = np.zeros(len(bounds) - 1, np.int64)
    _launcher(kernel)(np.array(bounds, np.int64), results, torch.get_num_threads(), *args)
    returned: list[int] = results.tolist()
    if FAILED in returned:
        raise MemoryError(f"no memory for {kernel.__name__}")
    return returned


@cache
def _launcher(kernel: Any) -> Callable[..., None]:
    """The compiled function that enters the team with a kernel.

    It counts as part of the kernel's file, as for the cache.
    """
    if not is_there():
        raise RuntimeError("torch's threads cannot be entered here: ask can_run before run")
    python = kernel.py_func
    name = f"{kernel.__name__}_on_team"
    text = (
        f"def {name}(bounds, results, num_threads, *args):\n    run_on_team(kernel, bounds,"
        " results, num_threads, args)\n"
    )
    scope = {"__name__": python.__module__, "kernel": kernel, "run_on_team": run_on_team}
    exec(compile(text, python.__code__.co_filename, "exec"), scope)
    return compiled(scope[name])


def keep_after_fork() -> None:
    """Promise that OpenMP computes nothing here, so that forked processes have their own teams."""
    global _is_promised
    _is_promised = True


def _lose() -> None:
    global _is_lost
    _is_lost = not _is_promised


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_lose)


def _run_on_team(
    typingctx: Any, kernel: Any, bounds: Any, results: Any, num_threads: Any, args: Any
) -> Any:
    """Typing and code of :func:`run_on_team`."""
    called = kernel.get_call_type(typingctx, (*args.types, types.intp, types.intp), {})
    if called.return_type not in (types.none, types.int64):
        raise TypingError(f"a kernel that returns {called.return_type}: need an integer or nothing")
    machine_code = kernel.dispatcher.get_compile_result(called)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        context.active_code_library.add_linking_library(machine_code.library)
        bound_array = context.make_array(bounds)(context, builder, values[1])
        result_array = context.make_array(results)(context, builder, values[2])
        num_ranges = cgutils.unpack_tuple(builder, result_array.shape)[0]
        shared = cgutils.pack_struct(
            builder, [num_ranges, bound_array.data, result_array.data, values[4]]
        )
        place = cgutils.alloca_once_value(builder, shared)

        region = ir.Function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [_ADDRESS]),
            f"{builder.function.name}.region",
        )
        region.linkage = "internal"
        inner = ir.IRBuilder(region.append_basic_block())
        here = inner.load(inner.bitcast(region.args[0], place.type))
        count, all_bounds, all_results, packed = (inner.extract_value(here, i) for i in range(4))
        thread, team = (inner.zext(_call(inner, name, _INT32, []), _INT64) for name in ENTRIES[1:])
        with cgutils.for_range_slice(inner, thread, count, team, _INT64) as (i, _):
            ends = [
                inner.load(inner.gep(all_bounds, [inner.add(i, _INT64(after))])) for after in (0, 1)
            ]
            arguments = [inner.extract_value(packed, index) for index in range(len(args.types))]
            status, value = context.call_internal_no_propagate(
                inner, machine_code.fndesc, called, arguments + ends
            )
            returned = _INT64(0) if called.return_type == types.none else value
            inner.store(
                inner.select(status.is_error, _INT64(FAILED), returned), inner.gep(all_results, [i])
            )
        inner.ret_void()

        threads = builder.trunc(values[3], _INT32)
        _call(
            builder,
            ENTRIES[0],
            ir.VoidType(),
            [region, builder.bitcast(place, _ADDRESS), threads, _INT32(0)],
        )
        return context.get_dummy_value()

    return types.void(kernel, bounds, results, types.int64, args), generate


def _call(builder: Any, name: str, returns: Any, values: list[Any]) -> Any:
    kind = ir.FunctionType(returns, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, PREFIX + name), values)


# (kernel, bounds, results, num_threads, args)
run_on_team: Callable[..., None] = intrinsic(_run_on_team)
