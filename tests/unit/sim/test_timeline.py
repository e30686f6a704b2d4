"""Threads, messages and links of a program: what can be worked out by hand."""

import numpy as np
import pytest

from pibroch.errors import ConfigError, PibrochError
from pibroch.sim.cluster import Cluster, Flow, bytes_per_second
from pibroch.sim.machine import Accelerator, Link, Machine, PartCost, shipped_machines
from pibroch.sim.program import Program
from pibroch.sim.timeline import ALONE, Timeline

MACHINE = Machine(name="m", cpu="c", cores=2, flops_per_second=1e9, network=Link(message_s=0.5))


def cluster(hosts, link=100.0, per_host=1, hosts_per_machine=1):
    return Cluster(hosts, per_host, link, 1000.0, 1.0, hosts_per_machine)


def test_work_waits_for_its_thread_and_shares_cores():
    program = Program(cluster(2, hosts_per_machine=2), MACHINE)
    program.work("training", "dense", np.array([1.0, 1.0]))
    program.work("training", "dense", np.array([0.0, 1.0]))
    # one core for both hosts: 2 s for the first work of both, then one goes on alone
    assert program.run()[1].tolist() == [2.0, 2.0, 2.0, 3.0]


def test_a_message_takes_what_its_link_takes_after_the_last_rank_has_called():
    program = Program(cluster(2), MACHINE)
    program.work("c", "before", np.array([1.0, 3.0]))
    sent = np.array([[0, 200], [100, 0]])
    ends = program.exchange("c", "rows", program.flow(sent))
    # half a second, then 200 bytes at 100 bytes a second for either end of the larger one
    assert program.run()[1][ends].tolist() == [5.5, 5.5]


def test_what_a_link_saved_up_while_it_idled_passes_at_once():
    bursts = Cluster(2, 1, 100.0, 1000.0, 1.0, burst=50.0)
    program = Program(bursts, MACHINE)
    program.work("c", "before", np.full(2, 1.0))
    flow = program.flow(np.full((2, 2), 200.0))
    first = program.exchange("c", "rows", flow)
    second = program.exchange("c", "rows", flow)
    program.work("c", "between", np.full(2, 0.2))
    third = program.exchange("c", "rows", flow)
    ends = program.run()[1]
    # the whole bucket; nothing idles but for half a second of latency, which fills it; again
    assert ends[first].tolist() == [3.0, 3.0]
    assert ends[second].tolist() == [5.0, 5.0]
    assert ends[third].tolist() == pytest.approx([7.2, 7.2])


def test_messages_one_after_the_other_have_a_latency_each():
    program = Program(cluster(2), MACHINE)
    program.work("c", "before", np.zeros(2))
    ends = program.exchange("c", "counts", program.flow(np.ones((2, 2))), rounds=2)
    assert program.run()[1][ends].tolist() == [1.01, 1.01]


def test_who_waits_for_messages_is_woken_once_for_all_rounds():
    machine = MACHINE.model_copy(update={"network": Link(message_s=0.5, wait_s=0.25)})
    program = Program(cluster(2), machine)
    program.work("c", "before", np.zeros(2))
    ends = program.exchange("c", "counts", program.flow(np.ones((2, 2))), rounds=2)
    assert program.run()[1][ends].tolist() == pytest.approx([1.385, 1.385])


def test_after_the_last_byte_all_wait_as_long_as_the_last_of_them():
    machine = MACHINE.model_copy(update={"network": Link(wait_s=0.6)})
    program = Program(cluster(4), machine)
    program.work("c", "before", np.zeros(4))
    sent = np.full((4, 4), 100.0) - 100 * np.eye(4)
    ends = program.exchange("c", "rows", program.flow(sent), groups=[(0, 1, 2), (3,)])
    # 300 bytes, then of the three 0.6 * (1 + 1/2 + 1/3)
    assert program.run()[1][ends].tolist() == pytest.approx([4.1, 4.1, 4.1, 3.0])


def test_each_message_takes_time_of_its_rank():
    link = Link(call_cpu_s=0.5)
    machine = MACHINE.model_copy(update={"network": link, "memory": link})
    for per_host in (1, 2, 4):
        program = Program(cluster(4 // per_host, per_host=per_host), machine)
        program.work("c", "before", np.zeros(4))
        sent = np.full((4, 4), 1.0) - np.eye(4)
        ends = program.exchange("c", "rows", program.flow(sent))
        # three messages of a rank, on one core a host
        assert program.run()[1][ends].tolist() == [1.5 * per_host] * 4, per_host


def test_of_many_ranks_most_travels_before_the_last_calls():
    size = 5
    program = Program(cluster(size), MACHINE)
    program.work("c", "before", np.array([0.0, 0, 0, 0, 10]))
    sent = np.full((size, size), 100.0) - 100 * np.eye(size)
    ends = program.run_ends = program.exchange("c", "rows", program.flow(sent))
    # three of four parts are through; the last rank has all four before it
    assert program.run()[1][ends].tolist() == [11.5, 11.5, 11.5, 11.5, 14.0]


def test_of_sums_little_travels_before_the_last_calls():
    """A part passes through all ranks: one of the two others has had one of four rounds."""
    program = Program(cluster(3), MACHINE)
    program.work("c", "before", np.array([0.0, 0, 8]))
    flow = Flow.ring(600.0, program.cluster.host_of_rank)
    ends = program.exchange("c", "sums", flow, 4, summed=np.full(3, 600.0))
    # 800 bytes, seven of eight behind four latencies; the last rank has all of them before it
    assert program.run()[1][ends].tolist() == [17.0, 17.0, 17.0]


def test_flows_from_third_hosts_take_of_a_link_but_not_of_a_rings():
    machine = MACHINE.model_copy(update={"network": Link(contention=0.5)})

    def time_of(hosts, groups=None, per_host=1, summed=None):
        program = Program(cluster(hosts, per_host=per_host), machine)
        size = hosts * per_host
        program.work("c", "before", np.zeros(size))
        sent = np.full((size, size), 60.0) - 60 * np.eye(size)
        ends = program.exchange("c", "rows", program.flow(sent), 1, groups, summed)
        return program.run()[1][ends].tolist()

    # one of two flows of a link competes, then two of three; each link carries 120 and 180 bytes
    assert time_of(3) == pytest.approx([1.2 / 0.75] * 3)
    assert time_of(4) == pytest.approx([1.8 / (1 - 0.5 * 2 / 3)] * 4)
    assert time_of(3, summed=np.full(3, 60.0)) == [1.2] * 3
    # two hosts share two links, however many ranks they have, and whoever else is there
    assert time_of(2) == [0.6] * 2
    assert time_of(2, per_host=2) == pytest.approx([2.4] * 4)
    assert time_of(4, groups=[(0, 1), (2, 3)]) == [1.8] * 4


def test_groups_do_not_wait_for_each_other():
    program = Program(cluster(4), MACHINE)
    program.work("c", "dense", np.array([1.0, 2, 5, 4]))
    sent = np.zeros((4, 4))
    sent[0, 1] = sent[1, 0] = sent[2, 3] = sent[3, 2] = 100
    groups = [(0, 1), (2, 3)]
    message = program.exchange("c", "rows", program.flow(sent), groups=groups)
    assert program.run()[1][message].tolist() == [3.5, 3.5, 6.5, 6.5]
    alone = Program(cluster(2), MACHINE)
    own = alone.work("c", "dense", np.array([1.0, 2]))
    flow = alone.flow(np.zeros((2, 2)))
    assert alone.exchange("c", "rows", flow, groups=[(0,), (1,)]).tolist() == own.tolist()


def test_ranks_of_a_host_share_its_link():
    hosts = cluster(2, per_host=2).host_of_rank
    sent = np.full((4, 4), 10.0) - 10 * np.eye(4)
    flow = Flow.of(sent, hosts)
    assert flow.out_link.tolist() == [20.0] * 4 and flow.out_local.tolist() == [10.0] * 4
    ring = Flow.ring(100.0, hosts)
    assert ring.out_link.tolist() == [150.0, 0.0, 150.0, 0.0]
    assert ring.in_link.tolist() == [0.0, 150.0, 0.0, 150.0]


def test_jitter_is_of_its_seed_and_makes_ranks_wait():
    def time_of(jitter, seed):
        program = Program(cluster(8), MACHINE, jitter, seed)
        for _ in range(20):
            program.work("c", "dense", np.ones(8))
            program.exchange("c", "rows", program.flow(np.ones((8, 8))))
        return program.run()[1].max()

    assert time_of(0.2, 1) == time_of(0.2, 1) != time_of(0.2, 2)
    assert time_of(0.0, 1) == pytest.approx(20 * 1.51)
    assert time_of(0.2, 1) > 1.05 * time_of(0.0, 1)


def test_tasks_that_wait_for_each_other_are_a_bug_that_is_said():
    line = Timeline([1.0])
    nobody = np.array([ALONE])
    first = line.add(nobody, np.ones(1))
    second = line.add(nobody, np.ones(1), [first])
    line._before.append(second)
    line._after.append(first)
    with pytest.raises(PibrochError, match="wait for each other"):
        line.run()


@pytest.mark.parametrize("rate", ["0gbit", "fast", "-1gbit", "100"])
def test_a_link_that_is_none(rate):
    with pytest.raises(ConfigError, match="above zero"):
        bytes_per_second(rate)


def test_costs_are_sums_over_what_a_part_is_about():
    cost = PartCost(call=1.0, rows_in=0.5, bytes_out=0.25)
    assert cost.seconds(np.array([[7.0, 2, 0, 0, 4], [0, 0, 0, 0, 0]])).tolist() == [3.0, 1.0]


def test_an_accelerator_reads_and_writes_its_memory_once_for_each_byte():
    rates = Accelerator(flops=1e12, memory_bytes_per_second=1e9, memory_bytes=1e10)
    machine = MACHINE.model_copy(update={"accelerator": rates})
    about = np.array([[10.0, 3, 400, 5, 600], [0, 0, 0, 0, 0]])  # ids, rows and bytes, in and out
    assert machine.cost("update", 0, about).tolist() == [2 * (8 * 10 + 400 + 600) / 1e9, 0.0]


@pytest.mark.parametrize("name", shipped_machines())
def test_files_that_ship_name_their_sources(name):
    machine = Machine.load(name)
    assert machine.sources and machine.accelerator is not None
    assert machine.accelerator.flops == machine.flops_per_second
    assert {"nvlink", "pcie"} <= set(machine.links)


def test_a_file_comes_back_as_it_was_written(tmp_path):
    MACHINE.save(tmp_path / "m.json")
    assert Machine.load(str(tmp_path / "m.json")) == MACHINE
    (tmp_path / "n.json").write_text('{"format": "other"}')
    with pytest.raises(ConfigError, match=r"n\.json"):
        Machine.load(str(tmp_path / "n.json"))
