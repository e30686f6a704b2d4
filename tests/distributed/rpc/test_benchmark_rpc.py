"""Topic ``rpc`` with real pairs, small enough for a test, and its examples."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import rpc_ablation
from benchmarks.comparison import OURS
from benchmarks.load import ForeignLoad
from benchmarks.registry import Options
from benchmarks.rpc_pairs import local_environment, pairs
from benchmarks.runner import Schedule
from benchmarks.topics import rpc as topic
from benchmarks.topics.rpc import KB, MB, ONE_HOST, Phase
from benchmarks.workers.rpc_pibroch import WITHOUT
from launched_team import wait_until

from pibroch.ports import free_port

CHECKOUT = Path(__file__).resolve().parents[3]

SHORT = Schedule(rounds=1, steps_per_round=10, warmup_steps=1)
PHASES = [
    Phase("identity", KB, SHORT),
    Phase("identity", 4 * MB, SHORT),
    Phase("in_flight", 16, SHORT),
    Phase("rref", 4 * MB, SHORT),
    Phase("grad", 0, SHORT),
]


@pytest.mark.slow
def test_a_measurement_from_start_to_end(tmp_path):
    options = Options(True, tmp_path, lambda text: None)
    lineup = topic.lineup(PHASES)
    with pairs(lineup.specs, None, ForeignLoad()) as running:
        members = [member.pid for pair in running for member in pair.members]
        versions = topic.prepare(running, ONE_HOST, options, sizes=1)
        rows = topic.measure_all(running, ONE_HOST, PHASES, options)
    assert not any(Path(f"/proc/{pid}").exists() for pid in members)
    assert {"pibroch", "torch"} <= set(versions)
    with_references = {OURS, topic.TORCH}
    with_calls = {spec.label for spec in lineup.specs}
    assert {(row["call"], row["contender"]) for row in rows} == {
        *((call, label) for call in ("identity", "16 in flight") for label in with_calls),
        *((call, label) for call in ("rref", "grad-fwd", "grad-bwd") for label in with_references),
    }
    for row in rows:
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert row["call"] == "16 in flight" or row["p50_ms"] > 0.02, (
            "two processes cannot be so quick"
        )
    assert len(topic.headlines(rows)) == 6


def test_both_processes_of_a_pair_have_the_variables_of_their_contender():
    without = next(
        spec for spec in rpc_ablation.specs() if spec.environment.get(WITHOUT) == "caller_reads"
    )
    with pairs([without], None, ForeignLoad()) as running:
        members = [Path(f"/proc/{member.pid}/environ") for member in running[0].members]
        variable = f"{WITHOUT}=caller_reads".encode()
        # a process that has just been forked still shows its parent's
        wait_until(lambda: all(variable in each.read_bytes().split(b"\0") for each in members))


@pytest.mark.parametrize("label", topic.EXAMPLES)
def test_the_examples_whose_lines_are_counted_run(label):
    if label == topic.GRPC:
        pytest.importorskip("grpc")
    script = CHECKOUT / "benchmarks" / "workers" / topic.EXAMPLES[label]
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script)],
            env=os.environ | local_environment(rank, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0].decode() for process in running]
        assert [process.returncode for process in running] == [0, 0], outputs
    finally:
        for process in running:
            process.kill()
            process.wait()
