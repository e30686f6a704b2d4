import re

import numpy as np
import pytest

from pibroch.errors import ConfigError, DataError
from pibroch.planner import cost as costs
from pibroch.planner.assignment import Assignment
from pibroch.planner.diff import diff
from pibroch.planner.explain import (
    headlines,
    policy_rows,
    sentences,
    shard_rows,
    step_rows,
    write_page,
)
from pibroch.planner.make import PlanOptions, make_plan
from pibroch.planner.plan import Plan
from pibroch.planner.replicate import POLICIES
from pibroch.planner.store import load_plan, save_plan
from pibroch.planner.topology import ClusterTopology
from planner_cases import sizes, zipf_profile

PROFILE = zipf_profile({"a": 3000, "b": 40}, 20_000)


@pytest.fixture(scope="module")
def plans():
    topology = ClusterTopology.hierarchical(2, 2, 3.0)
    tables = sizes(PROFILE)
    one = make_plan(tables, PROFILE, topology, PlanOptions(0.05))
    other = make_plan(
        tables, PROFILE, topology, PlanOptions(0.1, "training", "everywhere", steps=False)
    )
    return one, other


def test_plans_are_files(tmp_path, plans):
    for number, (assignment, prediction) in enumerate(plans):
        path = tmp_path / "new" / f"plan{number}"
        save_plan(path, assignment, prediction)
        again, text = load_plan(path)
        assert text == prediction
        assert (again.home == assignment.home).all() and again.home.dtype == np.uint16
        assert (again.copies == assignment.copies).all() and again.copies.dtype == bool
        assert (again.source is None) == (assignment.source is None)
        if assignment.source is not None:
            assert (again.source == assignment.source).all()
        for name, rows in assignment.partition_of.items():
            assert (again.partition_of[name] == rows).all() and rows.dtype == np.uint16


def test_a_budget_of_less_than_a_row_is_said_to_be_rounded_up(plans):
    tiny = zipf_profile({"a": 7}, 100)
    _, prediction = make_plan(sizes(tiny), tiny, ClusterTopology.uniform(2), PlanOptions(0.05))
    assert prediction.used_extra > prediction.extra
    text = dict(headlines(prediction))["extra memory"]
    assert text.endswith("of 5.00%, rounded up to whole partitions of rows on each shard")
    usual = plans[1][1]
    assert dict(headlines(usual))["extra memory"] == f"{usual.used_extra:.2%} of 10.00%"


def test_files_that_are_no_plan_are_refused(tmp_path, plans):
    path = tmp_path / "plan"
    rows = tmp_path / "plan.rows"
    save_plan(path, *plans[0])
    for file in (path, rows):
        whole = file.read_bytes()
        for damaged in (b"", whole[:-4], b"nothing of the kind"):
            file.write_bytes(damaged)
            with pytest.raises(ConfigError):
                load_plan(path)
        file.write_bytes(whole)
    assert load_plan(path)[1] == plans[0][1]
    Plan.by_rows(plans[0][0]).save(path)
    with pytest.raises(ConfigError, match="without a prediction"):
        load_plan(path)
    with pytest.raises(ConfigError, match="which is not there"):
        load_plan(tmp_path / "none")
    PROFILE.save(path)
    with pytest.raises(ConfigError, match="plan, damaged"):
        load_plan(path)


def test_plans_of_before_hold_their_matrices_in_the_json(tmp_path, plans):
    assignment, prediction = plans[0]
    content = {"prediction": prediction.model_dump(mode="json")}
    Plan.by_rows(assignment, content).save(tmp_path / "plan")
    assert load_plan(tmp_path / "plan")[1] == prediction


def test_a_plan_for_a_thousand_shards_is_written_and_read(tmp_path):
    shards = 1_024
    topology = ClusterTopology.uniform(shards)
    options = PlanOptions(extra=0, steps=False)
    assignment, prediction = make_plan(sizes(PROFILE), PROFILE, topology, options)
    save_plan(tmp_path / "plan", assignment, prediction)
    assert (tmp_path / "plan").stat().st_size < 4_000_000
    again, read = load_plan(tmp_path / "plan")
    assert read == prediction and read.num_shards == shards
    np.testing.assert_array_equal(again.home, assignment.home)


def test_sources_are_stored_only_where_they_differ_from_the_rule(plans):
    for assignment, prediction in plans:
        topology = ClusterTopology.hierarchical(2, 2, 3.0)
        by_rule = costs.sources(assignment.home, assignment.copies, topology.cost)
        if assignment.source is not None:
            assert not np.array_equal(by_rule, assignment.source)
            assert costs.holders(assignment.home, assignment.copies)[
                np.arange(len(by_rule))[:, None], assignment.source
            ].all()
        assert prediction.hosts == [0, 0, 1, 1]


def test_each_policy_is_predicted():
    topology = ClusterTopology.uniform(3)
    tables = sizes(PROFILE)
    for mode, names in POLICIES.items():
        _, prediction = make_plan(tables, PROFILE, topology, PlanOptions(0.05, mode))
        result = {one.policy: one for one in prediction.policies}
        assert tuple(result) == names and result["none"].copied_rows == 0
        sent = {name: one.read_bytes + one.sync_bytes for name, one in result.items()}
        if mode == "training":
            assert sent["safe"] <= sent["none"] * (1 + 1e-9) < sent["everywhere"]
        else:
            assert (
                sent["links"] <= sent["everywhere"] * 1.02 < sent["none"]
                and not result["links"].sync_bytes
            )
        assert policy_rows(prediction)[0][0] == f"{names[0]} (this plan)"


def test_figures_and_words(plans):
    (_, one), (_, other) = plans
    assert dict(headlines(one))["extra memory"].endswith("of 5.00%")
    assert "worst link over its lower bound" in dict(headlines(one))
    assert "worst link over its lower bound" not in dict(headlines(other))
    assert any("Algorithm 1" in text for text in sentences(one))
    assert any("gradients" in text for text in sentences(other)) and not any(
        "gradients" in s for s in sentences(one)
    )
    assert len(shard_rows(one)) == 4 and [row[0] for row in step_rows(one)] == [
        "0%",
        "1%",
        "2%",
        "5%",
        "10%",
        "20%",
    ]
    assert step_rows(one)[0][-1] == "1.000" and step_rows(other) == []


def test_the_page_needs_nothing_but_itself(tmp_path, plans):
    (_, prediction), (_, other) = plans
    prediction = prediction.model_copy(update={"sync_bytes": other.sync_bytes})
    page = write_page(prediction, "<my> plan", tmp_path / "plan.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 9
    assert "&lt;my&gt; plan" in page and "<my>" not in page
    outside = [
        link for link in re.findall(r'(?:src|href)="([^"]*)"', page) if not link.startswith("#")
    ]
    assert not [link for link in outside if not link.startswith("data:")]
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]


def test_differences_row_by_row(plans):
    (one, _), (other, _) = plans
    result = diff(one, other)
    for name, table in result.tables.items():
        before = one.partition_of[name]
        after = other.partition_of[name]
        assert table.moved == (one.home[before] != other.home[after]).sum()
        held = [
            costs.holders(p.home, p.copies)[rows] for p, rows in ((one, before), (other, after))
        ]
        assert table.copies_added == (held[1] & ~held[0]).sum()
        assert table.copies_dropped == (held[0] & ~held[1]).sum()
        assert table.num_rows == len(before)
    assert result.moved == sum(table.moved for table in result.tables.values())
    assert result.rows_sent.sum() == sum(table.copies_added for table in result.tables.values())
    same = diff(one, one)
    assert same.moved == 0 and not same.rows_sent.any()


def test_plans_of_other_tables_cannot_be_compared(plans):
    (one, _), _ = plans
    fewer = Assignment({"a": one.partition_of["a"]}, one.home, one.copies)
    narrower = Assignment(one.partition_of, one.home % 2, one.copies[:, :2])
    with pytest.raises(DataError, match="differ in table 'b'"):
        diff(one, fewer)
    with pytest.raises(DataError, match="4 and 2 shards"):
        diff(one, narrower)
