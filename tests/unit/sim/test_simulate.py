"""`pibroch simulate`, from the command line."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from pibroch.cli.main import main
from pibroch.config import load_recipe
from pibroch.data import EncodedDataset
from pibroch.planner import Plan
from pibroch.sim import sampled
from pibroch.sim.calibrate import _fitted, _mean_link
from pibroch.sim.cluster import Cluster, Flow
from pibroch.sim.counting import count
from pibroch.sim.machine import Link, Machine, PartCost
from pibroch.sim.mirrored import count_few
from pibroch.sim.operation import FEATURES
from pibroch.sim.prediction import Conditions, predict
from pibroch.sim.provenance import notes_on
from pibroch.sim.recipe import Workload
from pibroch.sim.sampled import count_sampled_lookahead
from pibroch.sim.steps import Dense
from pibroch.sim.whole_steps import slowdown_of, step_s_of, wait_s_of, with_wait

TOO_FEW = "embedding.exchange.cache_rows=40"


@pytest.mark.parametrize("exchange", ["alltoall", "lookahead", "towers"])
def test_a_prediction_as_json(simulate, exchange):
    more = ["--set", f"embedding.exchange={exchange}"]
    if exchange == "lookahead":
        more += ["--set", "embedding.exchange.lookahead=3"]
    code, output, notes = simulate("--hosts", "2..4", "--json", *more)
    assert code == 0, notes
    two, four = json.loads(output)
    assert (two["hosts"], four["hosts"], two["exchange"]) == (2, 4, exchange)
    assert two["samples_per_second"] == pytest.approx(64 / two["step_seconds"])
    assert sum(two["parts_seconds"].values()) == pytest.approx(two["step_seconds"], rel=0.02)
    assert four["sent_bytes_per_rank"] > two["sent_bytes_per_rank"] > 1000
    assert "data" in notes and "sheet" in notes  # published rates, said


def test_a_slower_link_takes_longer_and_carries_the_same(simulate):
    slow, quick = (
        json.loads(simulate("--json", "--link", link)[1])[0] for link in ("1mbit", "100gbit")
    )
    assert slow["step_seconds"] > 10 * quick["step_seconds"]
    assert slow["link_bytes_per_host"] == quick["link_bytes_per_host"]
    # what a link carries at least
    assert slow["step_seconds"] > slow["link_bytes_per_host"] / 125_000


def test_a_link_that_decides_helps_most_and_one_that_does_not_little(simulate):
    slow, quick = (
        json.loads(simulate("--json", "--link", link)[1])[0] for link in ("1mbit", "800tbit")
    )
    saved = [
        1 - each["step_seconds_with_twice"]["link of each host"] / each["step_seconds"]
        for each in (slow, quick)
    ]
    assert saved[0] == pytest.approx(0.5, abs=0.02)
    assert 0 <= saved[1] < 0.2
    dense = slow["step_seconds_with_twice"]["speed of dense layers"]
    assert dense > 0.97 * slow["step_seconds"]


def test_deaths_cost_time_and_samples_their_price(simulate):
    words = ("--json", "--death-every", 1, "--recovery", 10, "--host-price", 4)
    cuts = ("--set", "train.cut_every_seconds=20")
    one = json.loads(simulate(*words, *cuts)[1])[0]
    assert one["goodput"] == pytest.approx(1 / (1 + 2 * (10 + 20 / 2) / 3600))
    hours = 1e9 / (one["samples_per_second"] * one["goodput"]) / 3600
    saving = json.loads(simulate(*words, *cuts, "--saving", 2)[1])[0]
    assert saving["goodput"] == pytest.approx(0.9 * one["goodput"])
    # a run that chooses the interval lets its cuts take 1.5 % of the time
    chosen = json.loads(simulate(*words)[1])[0]
    assert chosen["goodput"] == pytest.approx(0.985 / (1 + 2 * (10 + 30 / 2) / 3600))
    chosen = json.loads(simulate(*words, "--saving", 0.15)[1])[0]
    assert chosen["goodput"] == pytest.approx(0.985 / (1 + 2 * (10 + 10 / 2) / 3600))
    code, _, notes = simulate(*words, *cuts, "--saving", 20)
    assert code == 2 and "--saving 20 every 20 s" in notes
    assert one["price_of_a_billion_samples"] == pytest.approx(2 * 4 * hours)
    calm = json.loads(simulate("--json")[1])[0]
    assert (calm["goodput"], calm["price_of_a_billion_samples"]) == (1.0, None)


def test_a_page_of_a_sweep_works_offline(simulate, tmp_path):
    code, output, notes = simulate("--hosts", "1..4", "--page", tmp_path / "page.html")
    assert code == 0, notes
    assert "waiting for" in output and "wrote" in output
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 3 and "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--link", "0gbit"], "a number above zero"),
        (["--local", "carrier"], "nvlink, pcie"),
        (["--hosts", "0"], "--hosts 0"),
        (["--hosts", "9..3"], "N no more than M"),
        (["--calibration", "abacus"], "a100, h100, v100"),
        (["--hosts", "100000000"], "rows"),
        (["--set", "embedding.exchange=towers", "--hosts", "600"], "at most 512"),
        (
            [
                "--death-every",
                "1",
                "--set",
                "train.cut_every_seconds=0",
                "--set",
                "train.checkpoint_every_seconds=0",
            ],
            "leave --death-every out",
        ),
        (
            ["--hosts", "40", "--set", "embedding.exchange={name='alltoall', compress=true}"],
            "40 ranks with compressed messages",
        ),
        (
            ["--hosts", "40", "--set", "embedding.exchange={name='alltoall', assign='rows'}"],
            "40 ranks with samples that are assigned by rows",
        ),
        (
            ["--set", "embedding.exchange={name='lookahead', servers=2}"],
            "servers or a central oracle, which are not simulated",
        ),
    ],
)
def test_what_cannot_be_is_refused(simulate, words, message):
    code, _, notes = simulate(*words)
    assert code == 2, notes
    assert message in " ".join(notes.split())


def test_an_exchange_of_ones_own_and_work_that_a_calibration_does_not_know(
    simulate, tmp_path, monkeypatch
):
    example = Path(__file__).parents[3] / "examples" / "own_exchange.py"
    # by a name of its own, as other tests have registered the example
    text = example.read_text().replace('"ask_first"', '"ask_first_of_all"')
    (tmp_path / "of_ones_own.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    measured = Machine(
        name="elsewhere",
        cpu="Abacus",
        cores=3,
        flops_per_second=1e12,
        # of pibroch's own tasks, which happen to have the name of one's own
        operations={name: [PartCost(call=1.0)] for name in ("read", "update")},
    )
    measured.save(tmp_path / "m.json")
    words = ("--json", "--calibration", tmp_path / "m.json")
    own = ("--set", "embedding.exchange=of_ones_own:SPEC")
    code, output, notes = simulate(*words, *own)
    assert code == 0, notes
    (told,) = json.loads(output)
    assert "feed, lookup, read, update: elsewhere does not know" in " ".join(notes.split())
    assert told["parts_seconds"]["update"] < 0.5
    # rank 0 has all rows: what one rank requests comes back as rows, and goes as gradients
    assert told["sent_bytes_worst_rank"] > told["sent_bytes_per_rank"] > 1000


@pytest.mark.parametrize("setting", ["compress=true", "assign=rows"])
def test_messages_that_are_compressed_and_samples_that_are_assigned_send_less(simulate, setting):
    exchange = ("--set", "embedding.exchange=alltoall", "--samples", 512, "--json")
    (given,) = json.loads(simulate(*exchange)[1])
    (less,) = json.loads(simulate(*exchange, "--set", f"embedding.exchange.{setting}")[1])
    assert 0.6 * given["sent_bytes_per_rank"] < less["sent_bytes_per_rank"]
    assert less["sent_bytes_per_rank"] < 0.99 * given["sent_bytes_per_rank"]


def test_a_plan_that_retrieve_refuses_is_refused(simulate, data, tmp_path):
    config = load_recipe("synthetic_small", [f"data.dir={str(data)!r}"])
    tables = Workload.of(config, EncodedDataset.open(data)).tables
    for kind, is_taken in (("row_wise", True), ("row_wise_pooled", False)):
        path = tmp_path / f"{kind}.json"
        Plan.of(tables, 2, kind).save(path)
        setting = f"embedding.exchange={{name='retrieve', plan={str(path)!r}}}"
        code, _, notes = simulate("--hosts", "2", "--set", setting)
        assert code == (0 if is_taken else 2), notes
        assert is_taken or "owners pool" in " ".join(notes.split())


def test_an_unknown_recipe(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["pibroch", "simulate", "nothing_such"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "no shipped recipe" in " ".join(capsys.readouterr().err.split())


def test_the_calibration_of_another_machine_is_said(simulate, tmp_path):
    measured = Machine(
        name="elsewhere",
        cpu="Abacus",
        cores=3,
        flops_per_second=1e9,
        operations={
            name: [PartCost(call=1e-4)]
            for name in ("read", "route", "fetch", "pool", "combine", "update")
        },
    )
    measured.save(tmp_path / "m.json")
    code, _, notes = simulate("--calibration", tmp_path / "m.json")
    said = " ".join(notes.split())
    assert code == 0, notes
    assert "calibrated on elsewhere (Abacus, 3 cores), which is another machine" in said
    assert "the dense model was not measured on elsewhere" in said
    again = (
        f"there anew with `pibroch simulate calibrate synthetic_small --output {tmp_path}/m.json`"
    )
    assert f"{tmp_path}/m.json does not say when it was measured: measure {again}" in said


def test_a_machine_whose_steps_take_longer_than_their_parts(tmp_path, data):
    calibrated = tmp_path / "m.json"
    words = ["simulate", "calibrate", "synthetic_small", "--output", calibrated]
    settings = [f"data.dir={data}", "train.batch_size=64"]
    options = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "pibroch", *map(str, [*words, *options])]
    subprocess.run(command, check=True, timeout=300)
    machine = Machine.load(str(calibrated))
    assert machine.is_here and machine.slowdown not in (0.0, 1.0)
    now = datetime.now(UTC)
    assert now - timedelta(minutes=10) < machine.measured_at <= now
    assert not notes_on(machine, str(calibrated), "synthetic_small", now)
    # and what takes so much longer is found again
    config = load_recipe("synthetic_small", settings)
    workload = Workload.of(config, EncodedDataset.open(data))
    counts = count(workload.job(2, 64), 3)
    dense = Dense(machine.dense[workload.model_key], 64)
    still = with_wait(machine.model_copy(update={"jitter": 0.0, "slowdown": 1.0}), 0.0)
    ample = Conditions(Cluster(2, 1, 1e9, 1e9, 64.0), still, dense)
    parts = predict(counts, ample).parts_s
    alone = sum(value for name, value in parts.items() if not name.startswith("waiting"))
    assert slowdown_of(still, counts, dense, 1.3 * alone) == pytest.approx(1.3, rel=0.03)
    later = step_s_of(with_wait(still, 2e-3), counts, dense)
    assert later > step_s_of(still, counts, dense) + 2e-3
    assert wait_s_of(still, counts, dense, later) == pytest.approx(2e-3, rel=0.01)


def test_links_of_a_process_alone_cost_nothing():
    assert _mean_link([Link()]) == Link()
    means = _mean_link([Link(message_s=1.0), Link(bytes_per_second=2.0, message_s=2.0)])
    assert means == Link(message_s=1.5)


def test_costs_that_made_the_times_are_found():
    rng = np.random.default_rng(0)
    about = rng.random((12, len(FEATURES))) * [1e5, 1e4, 1e6, 1e4, 1e6]
    made = PartCost(call=1e-4, ids=1e-8, bytes_in=3e-10)
    found = _fitted(list(zip(about, made.seconds(about).tolist(), strict=True)))
    np.testing.assert_allclose(found.seconds(about), made.seconds(about), rtol=1e-6)
    assert found.ids == pytest.approx(1e-8, rel=1e-3)


def test_modules_of_towers_send_what_they_give_and_sum_among_those_who_have_them(data):
    changes = ["model.towers.count=3", "model.towers.combined=1"]
    changes.append("embedding.exchange.ranks_per_host=2")
    workload = Workload.of(
        load_recipe("synthetic_small_towers", changes), EncodedDataset.open(data)
    )
    job = workload.job(4, 64, ranks_per_host=2)
    towers = workload.towers(4, 2)
    assert workload.exchange(4, 2) == "towers" and workload.exchange(2, 2) == "alltoall"
    modules = towers.modules
    # 26 features in three towers, the last two on the second host
    assert modules.widths == [8 * (9 + 1), 8 * (9 + 8 + 2)]
    np.testing.assert_allclose(modules.work, [9 / 26, 17 / 26])
    np.testing.assert_allclose(towers.work, [18 / 26] * 2 + [34 / 26] * 2)
    (step,) = count(job, 1)
    to_first, to_last = 4 * 64 * np.array(modules.widths)
    sent = [[0, 0, to_first, 0], [0, 0, 0, to_first], [to_last, 0, 0, 0], [0, to_last, 0, 0]]
    assert step["embeddings"].sent[0].tolist() == sent
    assert step["gradients"].sent[0].tolist() == np.transpose(sent).tolist()
    num_bytes = sum(4 * parameter.numel() for parameter in workload.model().parameters())
    cost, _ = workload.dense_cost(Machine.load("a100"), 1.0)
    of_all, inside = Dense(cost, 64, towers).sums(np.array([0, 0, 1, 1]))
    bytes_inside = inside.out_local.sum() + inside.out_link.sum()
    assert bytes_inside == 2 * sum(modules.num_bytes) and not inside.out_link.any()
    assert (of_all.out_local + of_all.out_link)[0] * 2 / 3 == num_bytes - sum(modules.num_bytes)


def test_modules_of_towers_save_time_where_links_are_slow(simulate):
    recipe = ["--set", "model.name=tower_dlrm", "--set", "embedding.exchange=towers"]
    recipe += ["--set", "model.towers.count=2", "--ranks-per-host", "2", "--json"]
    through, narrow = (
        json.loads(simulate("--link", "10mbit", "--samples", "512", *recipe, "--set", more)[1])[0]
        for more in ("model.towers.pass_through=true", "model.towers.width=4")
    )
    assert narrow["step_seconds"] < 0.8 * through["step_seconds"]
    assert narrow["parts_seconds"]["waiting for embeddings"] > 0 < narrow["parts_seconds"]["towers"]
    assert "towers" not in through["parts_seconds"]


def test_a_few_ranks_stand_for_all(data):
    config = load_recipe("synthetic_small", ["embedding.exchange=alltoall"])
    job = Workload.of(config, EncodedDataset.open(data)).job(12, 64)
    all_ranks = sum(each.sent.sum() for each in count(job, 2)) / 2
    few, error = count_few(job, 3, 2)
    counted = sum(
        (sent.out_link + sent.out_local).sum()
        for step in few
        for done in step.operations
        for sent in done.sent
    )
    assert counted / 2 == pytest.approx(all_ranks, rel=0.02)
    assert 0 < error < 0.02
    rows = few[0]["update"].sent[0]
    assert rows.out_local[0] / rows.out_link[0] == pytest.approx(2 / 9)


@pytest.mark.parametrize(("reads", "tolerance"), [(sampled.READS, 0.04), (600, 0.12)])
def test_a_sample_of_rows_stands_for_all(data, monkeypatch, reads, tolerance):
    """Bytes and rows of each operation, beside all ranks with all rows."""
    monkeypatch.setattr(sampled, "READS", reads)
    monkeypatch.setattr(sampled, "LEAST_ROWS", 24)
    config = load_recipe("synthetic_small_lookahead", ["embedding.exchange.lookahead=6"])
    job = Workload.of(config, EncodedDataset.open(data)).job(12, 64)
    exact = count(job, 8)
    few, error = count_sampled_lookahead(job, 3, 8)
    names = [{each.name for each in steps[0].operations} for steps in (exact, few)]
    assert names[0] == names[1]

    def mean(steps, name):
        """Features of all parts together, and bytes sent, of the mean rank."""
        done = [step[name] for step in steps]
        parts = [np.sum([part.mean(0) for part in each.parts], axis=0) for each in done]
        sent = [
            sum(float((one.out if isinstance(one, Flow) else one).sum()) for one in each.sent)
            for each in done
        ]
        return [*np.mean(parts, axis=0), np.mean(sent) / job.num_ranks]

    for name in (each.name for each in exact[0].operations):
        assert mean(few, name) == pytest.approx(mean(exact, name), rel=tolerance, abs=40), name
    slots = np.mean([step.num_slots.mean() for step in exact])
    assert np.mean([step.num_slots.mean() for step in few]) == pytest.approx(slots, rel=tolerance)
    for name, held in exact[0].held.items():
        assert few[0].held[name].mean() == pytest.approx(held.mean(), rel=0.35), name
    assert 0 < error < tolerance


def test_many_ranks_of_lookahead(simulate, monkeypatch):
    options = ["exchange=lookahead", "exchange.lookahead=4"]
    words = [word for each in options for word in ("--set", f"embedding.{each}")]
    code, output, notes = simulate("--hosts", 5, "--ranks-per-host", 8, "--json", *words)
    assert code == 0 and "standard error" in notes
    (told,) = json.loads(output)
    assert told["ranks"] == 40 and 0 < told["sampling_error"] < 0.1
    assert sum(told["parts_seconds"].values()) == pytest.approx(told["step_seconds"], rel=0.02)
    code, _, notes = simulate("--hosts", 5, "--ranks-per-host", 8, *words, "--set", TOO_FEW)
    assert code == 2 and "slots in use" in notes
    monkeypatch.setattr(sampled, "MAX_RANKS", 36)
    code, _, notes = simulate("--hosts", 5, "--ranks-per-host", 8, *words)
    assert code == 2 and "at most 36" in notes
