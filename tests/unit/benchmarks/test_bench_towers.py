"""The line-ups of the topic ``towers``, its bags, and how groups are compared."""

from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks import tower_quality
from benchmarks.cases import Arrays, Case
from benchmarks.topics import towers as topic
from benchmarks.workers import towers_pibroch

from pibroch.data import EncodedDataset
from pibroch.data.synthetic import SyntheticOptions, planted_groups, synthesize


def test_line_ups_have_the_baseline_first_and_models_that_agree():
    (quick,) = topic.settings(True)
    assert list(quick.entries) == [topic.BASELINE, topic.PASS_THROUGH, "towers, CR 2"]
    for setting in topic.settings(False):
        assert next(iter(setting.entries)) == topic.BASELINE
        assert {options["wire"] for options in setting.entries.values()} == {setting.wire}
    whole = topic.settings(False)[0]
    running = [SimpleNamespace(spec=SimpleNamespace(label=label)) for label in whole.entries]
    alike = [[team.spec.label for team in same] for same in topic.alike(running)]
    assert alike == [
        [topic.BASELINE, topic.PASS_THROUGH, topic.LOOKAHEAD],
        ["towers, CR 2", "same model, CR 2"],
        ["towers, CR 4", "same model, CR 4"],
    ]


def test_bags_are_each_ranks_part_of_the_batch(tmp_path, monkeypatch):
    ids = np.arange(2 * 3 * 20 * 4).reshape(2, 3, 80)
    Arrays(ids, np.zeros((2, 80, 13), np.float32), np.zeros((2, 80), np.float32)).save(
        tmp_path / "data.npz"
    )
    case = Case(str(tmp_path / "data.npz"), 4, batch_size=10, num_tables=3, most_ids=4)
    seen = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        for number, batch in enumerate(towers_pibroch.bags(case)):
            assert (
                batch.batch_size == 10
                and int(batch.lengths().min()) >= 1
                and int(batch.lengths().max()) <= 4
            )
            first = batch.values[batch.offsets[:-1]].view(3, 10)
            assert np.array_equal(
                first, ids[number].reshape(3, 20, 4)[:, rank * 10 : rank * 10 + 10, 0]
            )
            seen.append(batch.lengths().float().mean().item())
    assert np.mean(seen) == pytest.approx(2.5, abs=0.3)


def test_partitions_agree_by_pairs():
    right = [["a", "b"], ["c", "d"]]
    assert tower_quality._agreement(right[::-1], right) == 1.0
    assert tower_quality._agreement([["a", "c"], ["b", "d"]], right) == pytest.approx(2 / 6)


def test_planted_groups_are_found_by_the_embeddings_of_deepfm(tmp_path):
    """A model whose top network weighs each pair does not show the groups.

    It leaves embeddings free to point anywhere.

    Of a random partition the index is .65; with twice the samples, as in the benchmark, that of
    DeepFM is 1.
    """
    planted = SyntheticOptions(150_000, max_table_rows=30, groups=4)
    synthesize(planted, tmp_path / "data")
    options = SimpleNamespace(scratch=tmp_path, say=lambda text: None)
    result = tower_quality._learned(
        "deepfm", "coherent", EncodedDataset.open(tmp_path / "data"), options
    )
    assert tower_quality._agreement(result, planted_groups(planted)) >= 0.85
