"""What each rank does in the tests of the backend ``bls``."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import pibroch
from mpi_start import start_mpi
from pibroch.errors import MissingDependencyError

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip
_groups: dict = {}


def group_of(bound, backend="bls", transport=None):
    """One for all tests of a world."""
    key = backend, bound, transport
    if key not in _groups:
        options = (
            pibroch.BoundedLagOptions(bound=bound, transport=transport)
            if backend == "bls"
            else None
        )
        _groups[key] = dist.new_group(backend=backend, pg_options=options)
    return _groups[key]


def random_of(dtype, *shape, generator):
    raw = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator)
    return raw.to(dtype)


def rows(sender, receiver):
    return (3 * sender + 2 * receiver) % 5


def over_mpi(channel, bound):
    start_mpi(channel.ranks)
    return beside_gloo(channel, bound, "mpi")


def without_mpi(channel):
    try:
        group_of(1, transport="mpi")
    except MissingDependencyError as error:
        return str(error)
    return ""


def beside_gloo(channel, bound, transport=None):
    """Equal and ragged splits, lists, of several types and shapes.

    The same as gloo's, or what was sent where it has none.
    """
    ours = group_of(bound, transport=transport)
    gloo = group_of(bound, "gloo")
    here = channel.ranks.rank
    size = channel.ranks.world_size
    generator = torch.Generator().manual_seed(here)
    checked = 0
    for dtype, tail in itertools.product(DTYPES, [(), (3,), (20_000,)]):
        equal = random_of(dtype, 2 * size, *tail, generator=generator)
        ragged = random_of(
            dtype, sum(rows(here, p) for p in range(size)), *tail, generator=generator
        )
        splits = [rows(here, p) for p in range(size)]
        coming = [rows(p, here) for p in range(size)]
        results = []
        for group in (ours, gloo):
            wide = group is gloo and dtype in (
                torch.int16,
                torch.float8_e4m3fn,
                torch.uint16,
            )  # which gloo does not take
            outcomes = [torch.zeros_like(equal), torch.zeros(sum(coming), *tail).to(dtype)]
            outcomes += [torch.zeros(each, *tail).to(dtype) for each in coming]
            sent = [equal, ragged, *ragged.split(splits)]
            if wide:
                sent = [each.double() for each in sent]
                outcomes = [each.double() for each in outcomes]
            dist.all_to_all_single(outcomes[0], sent[0], group=group)
            dist.all_to_all_single(outcomes[1], sent[1], coming, splits, group=group)
            if group is ours:
                dist.all_to_all(outcomes[2:], sent[2:], group=group)
            else:
                outcomes[2:] = outcomes[1].split(coming)
            results.append([each.to(dtype) for each in outcomes] if wide else outcomes)
        for actual, other in zip(*results, strict=True):
            assert torch.equal(
                actual.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
            ), (
                dtype,
                tail,
            )
            checked += 1
    return checked


def asynchronous(channel, bound):
    """Several under way; waited for out of order, or by more than the bound.

    Inputs overwritten afterwards.
    """
    group = group_of(bound)
    here = channel.ranks.rank
    size = channel.ranks.world_size
    works = []
    outputs = []
    for number in range(12):
        sent = torch.arange(size) + 100 * here + 1000 * number
        outputs.append(torch.full_like(sent, -1))
        works.append(dist.all_to_all_single(outputs[-1], sent, group=group, async_op=True))
        if number == 5:
            assert works[4].wait()
            assert all(work.is_completed() for work in works[:5])
    works[10].wait()
    wanted = [torch.arange(size) * 100 + here + 1000 * number for number in range(12)]
    assert all(torch.equal(*pair) for pair in zip(outputs[:11], wanted[:11], strict=True))
    mixed = torch.zeros(size, dtype=torch.int64)
    one = torch.full((size,), here)
    dist.all_to_all_single(mixed, one, group=group)
    assert mixed.tolist() == list(range(size)) and torch.equal(outputs[11], wanted[11])
    strided = [torch.zeros(3, 2).t() for _ in range(size)]
    work = dist.all_to_all(
        strided, [torch.arange(6.0).view(2, 3) + p for p in range(size)], group=group, async_op=True
    )
    assert (
        torch.equal(work.result()[0], torch.arange(6.0).view(2, 3) + here)
        and work.get_future().done()
    )
    return works[11].is_completed()


def errors(channel):
    """Types of what is raised for bad arguments, by this backend and by gloo.

    All ranks go on together.
    """
    size = channel.ranks.world_size
    results = []
    ones = [1] * size
    bad = [
        lambda group: dist.all_to_all_single(
            torch.zeros(2 * size), torch.zeros(2 * size), ones, ones, group=group
        ),
        lambda group: dist.all_to_all_single(
            torch.zeros(size), torch.zeros(size), [1] * (size + 1), ones, group=group
        ),
        lambda group: dist.all_to_all_single(
            torch.zeros(2 * size), torch.zeros(2 * size + 1), group=group
        ),
        lambda group: dist.all_to_all_single(
            torch.zeros(size), torch.zeros(size).double(), group=group
        ),
        lambda group: dist.all_to_all_single(
            torch.zeros(size, 3), torch.zeros(3, size).t(), group=group
        ),
        lambda group: dist.all_to_all(
            [torch.zeros(1)] * (size - 1), [torch.zeros(1)] * size, group=group
        ),
    ]
    for call in bad:
        texts = []
        for group in (group_of(1), group_of(1, "gloo")):
            try:
                call(group)
                texts.append(None)
            except (RuntimeError, ValueError) as error:
                texts.append((type(error).__name__, str(error).splitlines()[0]))
        results.append(texts)
    return results


def all_else(channel):
    """What goes to the inner group: sums, barriers, point to point, DDP, objects.

    And functional all-to-all, which does not.
    """
    group = group_of(2)
    here = channel.ranks.rank
    size = channel.ranks.world_size
    total = torch.tensor([float(here)])
    dist.all_reduce(total, group=group)
    dist.barrier(group=group)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": here}, group=group)
    ring = torch.tensor([here])
    works = [
        dist.isend(ring, (here + 1) % size, group=group),
        dist.irecv(got := torch.zeros_like(ring), group=group),
    ]
    for work in works:
        work.wait()
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, here)  # rank 0's are taken
    parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    parallel(torch.full((1, 2), float(here + 1))).sum().backward()
    traded = functional.all_to_all_single(torch.full((size,), here), None, None, group)
    traded = functional.wait_tensor(traded) if hasattr(functional, "wait_tensor") else traded
    return (
        total.item(),
        objects,
        got.item(),
        model.weight.grad.tolist(),
        traded.tolist(),
        dist.get_backend(group),
    )


def dropped(channel, rounds):
    """Works that nobody waits for, whose tensors gloo's thread is often the last to hold."""
    group = group_of(2)
    size = channel.ranks.world_size
    for _ in range(rounds):
        one = torch.ones(1000)
        dist.all_to_all_single(torch.zeros(size), torch.zeros(size), group=group, async_op=True)
        dist.all_reduce(one.clone(), group=group, async_op=True)
        dist.broadcast(one.clone(), 0, group=group, async_op=True)
        dist.all_gather([torch.zeros(1000) for _ in range(size)], one, group=group, async_op=True)
        dist.barrier(group=group, async_op=True)
    dist.all_reduce(one, group=group)
    return one[0].item()


def by_environment(channel, value):
    """The bound of a group whose options say none."""
    import os

    if value is None:
        os.environ.pop("PIBROCH_BLS_BOUND", None)
    else:
        os.environ["PIBROCH_BLS_BOUND"] = value
    try:
        group = dist.new_group(backend="bls")
        bound = group.lag.window.bound
        group.shutdown()
        return bound
    except pibroch.errors.ConfigError as error:
        return str(error)
    finally:
        os.environ.pop("PIBROCH_BLS_BOUND", None)


def destroyed(channel, transport):
    """Descriptors and threads before a group, with it, and after it was destroyed."""
    import gc
    import time

    from lagged_cases import files_and_threads

    counts = []
    for _ in range(2):  # the first one leaves what torch keeps for all groups
        channel.barrier()
        counts = [files_and_threads()]
        group = dist.new_group(
            backend="bls", pg_options=pibroch.BoundedLagOptions(transport=transport)
        )
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4), group=group)
        counts.append(files_and_threads())
        channel.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        deadline = time.monotonic() + 10
        while files_and_threads() != counts[0] and time.monotonic() < deadline:
            pass  # the system still shows a thread that has just been joined
        counts.append(files_and_threads())
    return counts


def profiled(channel):
    """Spans of the backend's exchanges by name.

    Waited for at once or later, of equal parts, ragged or in lists.
    """
    group = group_of(1)
    size = channel.ranks.world_size
    # rank 0 sends two rows to each, the others one
    going = [1 + (channel.ranks.rank == 0)] * size
    coming = [2] + [1] * (size - 1)
    out = torch.zeros(sum(coming))
    rows = torch.zeros(sum(going))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_to_all_single(torch.zeros(size), torch.zeros(size), group=group)
        dist.all_to_all_single(
            torch.zeros(size), torch.zeros(size), group=group, async_op=True
        ).wait()
        dist.all_to_all_single(out, rows, coming, going, group=group)
        parts = [torch.zeros(1) for _ in range(size)]
        dist.all_to_all(parts, [torch.zeros(1) for _ in range(size)], group=group)
    counts = {event.key: event.count for event in profile.key_averages()}
    return {name: count for name, count in counts.items() if name.startswith("bls:")}
