import os
from pathlib import Path

import pytest

from pibroch.data.dataset import EncodedDataset
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.presets import criteo_schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.planner import cost as costs
from pibroch.planner.count import CountOptions, count_dataset
from pibroch.planner.make import PlanOptions, make_plan
from pibroch.planner.partition import TableSize, total_bytes
from pibroch.planner.topology import ClusterTopology

SAMPLE = (
    Path(os.environ.get("PIBROCH_TEST_DATA", Path(__file__).parents[4] / "shared" / "data"))
    / "criteo_kaggle_137k.tsv.gz"
)
REPLICAS = 44_000  # 1 % of 33.8 million rows, over 8 shards


@pytest.mark.slow
@pytest.mark.skipif(not SAMPLE.exists(), reason="no ../shared/data")
def test_hot_rows_of_earlier_samples_serve_later_ones(tmp_path):
    schema = criteo_schema(bins=False).with_changes(1, {})
    source = TextSource(SAMPLE, schema.separator, schema.quotes, schema.columns)
    options = PrepareOptions(SplitRule.parse("none", 0))
    prepare([source], schema, tmp_path / "data", options, lambda stage, fraction: None)
    dataset = EncodedDataset.open(tmp_path / "data")
    first, whole = (
        count_dataset(dataset, CountOptions(2048, first=number)) for number in (50_000, None)
    )
    tables = [TableSize(name, rows, 64, 64) for name, rows in first.num_rows.items()]
    budget = PlanOptions(
        REPLICAS * 7 * 64 / total_bytes(tables),
        policy="everywhere",
        objective="accesses",
        steps=False,
    )
    assignment, prediction = make_plan(tables, first, ClusterTopology.uniform(8), budget)
    assert prediction.copied_rows <= REPLICAS
    held = costs.holders(assignment.home, assignment.copies)
    crossing = 0
    reads = 0
    for name, partition in assignment.partition_of.items():
        later = whole.tables[name].accesses - first.tables[name].accesses
        reads += 8 * later.sum()
        crossing += later @ (~held[partition]).sum(axis=1)
    assert 7 / 8 * reads / crossing >= 9
