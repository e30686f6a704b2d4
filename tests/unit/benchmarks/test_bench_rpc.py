from itertools import pairwise

import pytest
import torch
from benchmarks import rpc_ablation
from benchmarks.comparison import OURS
from benchmarks.latency_policies import SWITCHED_OFF
from benchmarks.runner import Schedule, Times
from benchmarks.topics import rpc as topic
from benchmarks.topics.rpc import KB, MB, ONE_HOST, Phase
from benchmarks.workers import rpc_functions
from benchmarks.workers.rpc_pibroch import WITHOUT
from benchmarks.workers.rpc_subject import CALLS_PER_STEP, CallSubject, RpcSubject

SHORT = Schedule(rounds=2, steps_per_round=10, warmup_steps=3)


def all_phases():
    return (
        topic.phases_on_one_host(False)
        + topic.phases_on_one_host(True)
        + topic.phases_between_hosts()
    )


def test_every_phase_is_known_to_those_who_take_part():
    calls = set(CallSubject.phases(RpcSubject(None, None, {})))
    references = set(RpcSubject(None, None, {}).phases())
    for phase in all_phases():
        assert phase.takes(OURS)
        assert phase.name in references
        assert phase.name in calls or not phase.takes(topic.GRPC)
        assert phase.takes(topic.TORCH)


def test_the_ablation_has_a_pair_without_each_policy_and_all_of_them_take_part():
    whole, *without = rpc_ablation.specs()
    assert (whole.label, whole.environment) == (OURS, {})
    assert {spec.environment[WITHOUT] for spec in without} == set(SWITCHED_OFF)
    for quick in (False, True):
        phases = topic.phases_of_ablation(quick)
        assert all(
            phase.takes(spec.label) and phase.name in RpcSubject(None, None, {}).phases()
            for phase in phases
            for spec in without
        )
    rows = [
        {"contender": spec.label, "call": "identity", "size": "1 KB", "over_pibroch": 1.25}
        for spec in without
    ]
    assert rpc_ablation.worth(rows)[0] == "**without spin: identity 1 KB 1.25x**"


def test_no_phase_is_measured_twice_in_one_place():
    for phases in (
        topic.phases_on_one_host(False),
        topic.phases_on_one_host(True),
        topic.phases_between_hosts(),
    ):
        assert len({phase.name for phase in phases}) == len(phases)


def test_those_who_are_in_no_phase_are_not_started(monkeypatch):
    monkeypatch.setattr(topic, "find_spec", lambda name: None)
    full = topic.lineup(topic.phases_on_one_host(False))
    quick = topic.lineup(topic.phases_on_one_host(True))
    assert [spec.label for spec in full.specs] == [OURS, topic.TORCH, topic.TORCH_BASIC]
    assert [spec.label for spec in quick.specs] == [OURS, topic.TORCH]
    assert "gRPC left out" in quick.notes[0]
    monkeypatch.setattr(topic, "find_spec", lambda name: object())
    assert [spec.label for spec in topic.lineup(topic.phases_between_hosts()).specs] == [
        OURS,
        topic.TORCH,
        topic.GRPC,
    ]


def test_rows_of_calls():
    times = {
        OURS: Times([[100.0] * 10, [200.0] * 10], [50, 70]),
        topic.TORCH: Times([[300.0] * 10, [500.0] * 10], [90, 90]),
    }
    rows = topic.phase_rows(topic.LINE_RATE, Phase("identity", 5 * MB, SHORT), times)
    assert [row["over_pibroch"] for row in rows] == [1.0, 2.75]
    assert (rows[1]["over_least"], rows[1]["over_most"]) == (2.5, 3.0)
    assert rows[0]["line_share"] == pytest.approx(80 / 150)  # 10 MB take 80 ms
    assert (rows[0]["p20"], rows[0]["p50"], rows[0]["cpu"]) == ("100 ms", "150 ms", "60 ms")
    assert set(topic.COLUMNS) <= set(rows[0])
    headline, *more = topic.headlines(rows)
    assert (
        headline
        == "**1gbit identity 5 MB: pibroch 150 ms; 53% of the line's rate; torch takes 2.8x as"
        " long**"
    )
    assert more == []


def test_rows_of_calls_in_flight_are_per_call():
    row, _ = topic.phase_rows(
        ONE_HOST,
        Phase("in_flight", 16, SHORT),
        {OURS: Times([[100.0] * 10], [50]), "x": Times([[1.0]], [1])},
    )
    assert row["p50_ms"] == 100 / CALLS_PER_STEP
    assert row["calls_per_second"] == pytest.approx(CALLS_PER_STEP / 0.1)
    assert (row["call"], row["size"], row["line_share"]) == ("16 in flight", "1 KB", None)


def test_rows_of_autograd_take_the_timed_steps_alone():
    turns = [float("nan")] + [2.0] * 10 + [float("nan")] + [4.0] * 10
    parts = {OURS: {"grad-fwd": [float("nan")] * 3 + turns, "grad-bwd": [0.0] * 3 + turns}}
    forward, backward = topic.autograd_rows(ONE_HOST, Phase("grad", 0, SHORT), parts)
    assert (forward["call"], backward["call"]) == ("grad-fwd", "grad-bwd")
    assert (forward["p20_ms"], forward["p50_ms"], forward["p80_ms"]) == (2.0, 3.0, 4.0)
    (only_forward,) = topic.autograd_rows(
        ONE_HOST, Phase("nograd", 0, SHORT), {OURS: {"nograd-fwd": [1.0] * 25}}
    )
    assert only_forward["call"] == "nograd-fwd"


def test_durations_grow_with_their_text():
    texts = [topic.duration(10.0**exponent) for exponent in range(-3, 5)]
    assert texts == ["1 us", "10 us", "100 us", "1 ms", "10 ms", "100 ms", "1 s", "10 s"]


def test_pibroch_and_torch_need_the_same_lines():
    folder = topic.Path(topic.__file__).resolve().parent.parent / "workers"
    sources = {label: (folder / name).read_text() for label, name in topic.EXAMPLES.items()}
    ours, other = (
        [line for line in sources[label].splitlines()[1:] if line] for label in (OURS, topic.TORCH)
    )
    assert [(a, b) for a, b in zip(ours, other, strict=True) if a != b] == [
        ("from pibroch import rpc", "from torch.distributed import rpc")
    ]
    counts = [topic.code_lines(source) for source in sources.values()]
    assert counts[0] == counts[1] < counts[2]
    assert str(counts[2]) in topic.lines_note()


def test_the_functions_are_what_the_paper_describes():
    seen = []

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    argument = torch.rand(8)
    before = argument.clone()
    with Counting():
        result = rpc_functions.ops(argument)
    assert len(seen) == 200
    assert torch.equal(argument, before)
    assert not torch.equal(result, argument)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2_000_000,)], ids=str)
def test_grpc_packs_tensors_both_ways(shape):
    grpc = pytest.importorskip("benchmarks.workers.rpc_grpc", exc_type=ImportError)
    tensor = torch.rand(shape)
    chunks = list(grpc.pack_chunks(tensor))
    assert torch.equal(grpc.unpack_chunks(iter(chunks)), tensor)
    assert all(len(a) == grpc.CHUNK_BYTES for a, _ in pairwise(chunks[1:]))
    if shape != (0,):
        assert torch.equal(grpc.unpack(grpc.pack(tensor)), tensor)
    assert tensor.nbytes == sum(map(len, chunks[1:]))


def test_a_wrong_result_is_an_error():
    class Wrong(CallSubject):
        def start(self, function, tensor):
            return getattr(rpc_functions, function)(tensor) + (1e-3 if function == "ops" else 0)

        def finish(self, started):
            return started

        def versions(self):
            return {}

    with pytest.raises(AssertionError, match=f"result of ops for {KB} bytes"):
        Wrong().check(1)
    Wrong().phases()["in_flight:16"](0)
