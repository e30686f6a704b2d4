import json
import subprocess
import sys

import numpy as np
import pytest

from pibroch.data.dataset import EncodedDataset
from pibroch.data.loader import Loader
from pibroch.data.planted import CLICK_RATE, TruthMeter
from pibroch.data.skew import CRITEO_SKEW, Skew, rank_probabilities
from pibroch.data.splits import SplitRule
from pibroch.data.synthetic import Generator, SyntheticOptions, planted_groups, synthesize
from pibroch.errors import ConfigError, DataError


def top_shares(counts: np.ndarray) -> tuple[float, float, float]:
    """Shares of the top value, 0.1 % and 1 % of rows."""
    falling = np.sort(counts)[::-1]
    ranks = [1, max(1, round(len(counts) / 1000)), max(1, round(len(counts) / 100))]
    return tuple(float(falling[:rank].sum() / counts.sum()) for rank in ranks)  # type: ignore[return-value]


def true_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """By ranks, the textbook's way."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positive = int(labels.sum())
    return (ranks[labels == 1].sum() - positive * (positive + 1) / 2) / (
        positive * (len(labels) - positive)
    )


@pytest.mark.parametrize("skew", CRITEO_SKEW[:4])
def test_probabilities_have_the_measured_shares(skew):
    probabilities = rank_probabilities(skew, skew.num_values)
    np.testing.assert_allclose(
        top_shares(probabilities), (skew.top_value, skew.top_permille, skew.top_percent), atol=1e-6
    )
    assert (np.diff(probabilities) <= 0).all()
    assert (probabilities > 0).all()


@pytest.mark.parametrize("num_rows", [1, 2, 50, 1001])
def test_any_table_size_has_a_distribution(num_rows):
    for skew in (*CRITEO_SKEW, Skew(10, 0.1, 0.1, 0.1)):
        probabilities = rank_probabilities(skew, num_rows)
        assert len(probabilities) == num_rows
        assert probabilities.sum() == pytest.approx(1)


def test_drawn_ids_are_as_skewed_as_the_real_ones(tmp_path):
    synthesize(SyntheticOptions(200_000, max_table_rows=70_000), tmp_path / "d")
    dataset = EncodedDataset.open(tmp_path / "d")
    for i, skew in enumerate(CRITEO_SKEW):
        counts = dataset.access_counts(f"C{i + 1}")[2:]
        assert len(counts) == skew.num_values
        np.testing.assert_allclose(
            top_shares(counts), (skew.top_value, skew.top_permille, skew.top_percent), atol=0.012
        )


@pytest.mark.parametrize("multi_hot", [False, True])
def test_a_sample_does_not_depend_on_the_chunk(multi_hot):
    generator = Generator(SyntheticOptions(100, seed=4, max_table_rows=50, multi_hot=multi_hot))
    whole, logits = generator.samples(0, 100)
    part, part_logits = generator.samples(30, 25)
    np.testing.assert_array_equal(part.ids, whole.ids[30:55])
    np.testing.assert_array_equal(part.dense, whole.dense[30:55])
    np.testing.assert_array_equal(part.labels, whole.labels[30:55])
    np.testing.assert_allclose(part_logits, logits[30:55])
    assert len(part.bags) == (8 if multi_hot else 0)
    for name, (lengths, values) in part.bags.items():
        whole_lengths, whole_values = whole.bags[name]
        np.testing.assert_array_equal(lengths, whole_lengths[30:55])
        start = whole_lengths[:30].sum()
        np.testing.assert_array_equal(values, whole_values[start : start + len(values)])


def test_logits_are_the_documented_sum():
    generator = Generator(SyntheticOptions(100, max_table_rows=50, multi_hot=True))
    rows, logits = generator.samples(0, 20)
    planted = generator._planted
    names = generator.schema.keys
    one_hot = [name for name in names if name not in rows.bags]
    for sample in range(20):
        fields = []
        for i, name in enumerate(names):
            if name in rows.bags:
                lengths, values = rows.bags[name]
                start = lengths[:sample].sum()
                ids = values[start : start + lengths[sample]] - 2
            else:
                ids = rows.ids[sample, [one_hot.index(name)]] - 2
            fields.append(planted.effects[planted.first_row[i] + ids].sum(0) * planted.bag_scale[i])
        fields = np.array(fields, float)
        standard = (rows.dense[sample] - planted.dense_mean) * planted.dense_scale
        pairs = sum(fields[f, 1:] @ fields[g, 1:] for f in range(26) for g in range(f))
        linear = standard @ planted.dense_effects + fields[:, 0].sum()
        expected = planted.bias + planted.linear_scale * linear + planted.pair_scale * pairs
        assert logits[sample] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_truth_is_what_the_textbook_says():
    rng = np.random.default_rng(1)
    logits = rng.normal(-1, 1.3, 20_000)
    probabilities = 1 / (1 + np.exp(-logits))
    labels = (rng.random(20_000) < probabilities).astype(np.uint8)
    meter = TruthMeter()
    for part in np.array_split(np.arange(20_000), 7):
        meter.add(logits[part], labels[part])
    metrics = meter.metrics()
    assert metrics["auc"] == pytest.approx(true_auc(logits, labels), abs=1e-6)
    loss = -(labels * np.log(probabilities) + (1 - labels) * np.log1p(-probabilities)).mean()
    assert metrics["logloss"] == pytest.approx(loss)
    assert metrics["expected_auc"] == pytest.approx(metrics["auc"], abs=0.01)
    assert metrics["click_rate"] == labels.mean()


def test_the_truth_lies_beside_the_data(tmp_path):
    truth = synthesize(SyntheticOptions(50_000, seed=2), tmp_path / "d")
    dataset = EncodedDataset.open(tmp_path / "d")
    dataset.verify()
    assert json.loads((tmp_path / "d" / "truth.json").read_text()) == dataset.truth == truth
    assert dataset.best_possible_auc == {
        split: truth[split]["auc"] for split in ("train", "validation", "test")
    }
    assert 0.76 < truth["train"]["auc"] < 0.82
    assert truth["train"]["click_rate"] == pytest.approx(CLICK_RATE, abs=0.01)
    assert truth["train"]["click_rate"] == pytest.approx(dataset.split("train").labels.mean())
    labels = dataset.split("test").labels
    probabilities = 1 / (
        1 + np.exp(-Generator(SyntheticOptions(50_000, seed=2)).samples(42_500, 7_500)[1])
    )
    assert truth["test"]["auc"] == pytest.approx(true_auc(probabilities, labels), abs=1e-6)


def test_seeds_differ_and_repeat(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        synthesize(SyntheticOptions(2000, seed=seed, max_table_rows=50), tmp_path / name)
    a, b, c = (EncodedDataset.open(tmp_path / name).split("train") for name in "abc")
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.labels, b.labels)
    assert (a.ids != c.ids).any()


def test_bags_load_and_have_their_rows(tmp_path):
    options = SyntheticOptions(
        3000, max_table_rows=50, multi_hot=True, split=SplitRule.parse("hash:0.8/0.1/0.1")
    )
    synthesize(options, tmp_path / "d")
    dataset = EncodedDataset.open(tmp_path / "d")
    rows = np.array(list(dataset.num_rows.values()))
    for batch in Loader(dataset.split("test"), 64, shuffle=True):
        batch.validate()
        lengths = batch.lengths().view(26, -1)
        assert lengths.max() > 5
        assert (lengths == 0).any()
        features = np.repeat(np.arange(26), lengths.sum(1))
        assert ((batch.values.numpy() >= 2) & (batch.values.numpy() < rows[features])).all()


def test_options_and_folders_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="0 samples"):
        synthesize(SyntheticOptions(0), tmp_path / "d")
    synthesize(SyntheticOptions(100, table_rows=30), tmp_path / "d")
    assert set(EncodedDataset.open(tmp_path / "d").num_rows.values()) == {32}
    with pytest.raises(DataError, match="--overwrite"):
        synthesize(SyntheticOptions(100), tmp_path / "d")
    synthesize(SyntheticOptions(200, table_rows=30), tmp_path / "d", overwrite=True)
    assert sum(EncodedDataset.open(tmp_path / "d").samples.values()) == 200


def test_memory_does_not_grow_with_the_samples(tmp_path):
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom pibroch.data.synthetic import"
        " SyntheticOptions, synthesize\nsynthesize(SyntheticOptions(int(sys.argv[1]),"
        " table_rows=100),"
        " Path(sys.argv[2]))\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for count in (140_000, 560_000):
        command = [sys.executable, "-c", code, str(count), str(tmp_path / str(count))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        peaks.append(int(done.stdout) * 1024)
    assert peaks[1] - peaks[0] < 15 << 20, "420,000 samples more take 68 MB on disk"


def test_planted_groups_interact_inside_alone_and_are_written_down(tmp_path):
    options = SyntheticOptions(50, max_table_rows=20, groups=4)
    planted = Generator(options)._planted
    names = Generator(options).schema.keys
    bounds = [*planted.first_row.tolist(), len(planted.effects)]
    factors = {name: planted.effects[bounds[i] : bounds[i + 1], 1:] for i, name in enumerate(names)}
    groups = planted_groups(options)
    assert sorted(name for group in groups for name in group) == sorted(names)
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    for one in names:
        for other in names:
            products = factors[one] @ factors[other].T
            assert products.any() == (group_of[one] == group_of[other])
            if group_of[one] == group_of[other]:  # all of a group's are of one direction
                assert np.linalg.matrix_rank(np.concatenate([factors[one], factors[other]])) == 1
    synthesize(options, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "groups.json").read_text()) == {"towers": groups}
    with pytest.raises(ConfigError, match="27 planted groups"):
        Generator(SyntheticOptions(50, groups=27))


@pytest.mark.parametrize("raw", [False, True])
def test_histories_tell_of_the_item_in_question(tmp_path, raw):
    options = SyntheticOptions(num_samples=4000, max_table_rows=100, history=6, raw=raw)
    truth = synthesize(options, tmp_path / "out")["train"]
    dataset = EncodedDataset.open(tmp_path / "out")
    assert dataset.schema.readers["C2"] == ("C2", "history")
    (batch,) = Loader(dataset.split("train"), 4000)
    lengths = batch.select(("history",)).lengths().numpy()
    assert set(lengths.tolist()) == set(range(7))
    if not raw:
        items, history = (batch.select((key,)).values.numpy() for key in ("C2", "history"))
        ids = np.concatenate([items, history])
        counts = np.bincount(ids, minlength=dataset.num_rows["C2"])
        assert dataset.access_counts("C2").tolist() == counts.tolist()
        is_alike = history % 8 == np.repeat(items, lengths) % 8
        has_alike = np.bincount(np.repeat(np.arange(len(items)), lengths), is_alike) > 0
        clicks = batch.labels.numpy()[: len(has_alike)]
        assert clicks[has_alike].mean() > clicks[~has_alike].mean() + 0.1
    whole, _ = Generator(options).samples(0, 300)
    part, _ = Generator(options).samples(100, 50)
    kept = np.zeros(300, np.bool_)
    kept[100:150] = True
    for here, there in zip(part.bags["history"], whole.chosen(kept).bags["history"], strict=True):
        assert np.array_equal(here, there)
    plain = synthesize(SyntheticOptions(num_samples=4000, max_table_rows=100), tmp_path / "plain")
    assert truth["expected_auc"] > plain["train"]["expected_auc"] + 0.02


def drifting(**changes):
    options = {"max_table_rows": 500, "raw": True, "drift": 0.1, "drift_every": 100, "seed": 3}
    return SyntheticOptions(1000, **(options | changes))


def test_hot_ids_are_replaced_and_no_others():
    still = Generator(drifting(drift=0.0))
    drifts = Generator(drifting())
    before, _ = still.samples(0, 1000)
    after, _ = drifts.samples(0, 1000)
    np.testing.assert_array_equal(before.raw_ids[:100], after.raw_ids[:100])
    np.testing.assert_array_equal(before.dense, after.dense)
    places, _ = Generator(drifting(drift=0.0, raw=False)).samples(0, 1000)
    is_hot = places.ids - 2 < np.minimum([skew.num_values for skew in CRITEO_SKEW], 500) // 10
    has_changed = before.raw_ids != after.raw_ids
    assert not has_changed[~is_hot].any()
    shares = [has_changed[start:][is_hot[start:]].mean() for start in (200, 500, 900)]
    assert 0 < shares[0] < shares[1] < shares[2]
    # of 50 hot places of the largest tables each time five, so 45 in the last hundred samples
    column = [skew.num_values for skew in CRITEO_SKEW].index(max(s.num_values for s in CRITEO_SKEW))
    late = slice(900, 1000)
    replaced = places.ids[late, column][has_changed[late, column]]
    kept = places.ids[late, column][~has_changed[late, column] & is_hot[late, column]]
    assert not set(replaced) & set(kept) and len(set(kept)) <= 5
    part, _ = drifts.samples(930, 20)
    np.testing.assert_array_equal(part.raw_ids, after.raw_ids[930:950])


def test_new_ids_have_effects_of_their_own_and_the_truth_knows_them(tmp_path):
    truth = synthesize(drifting(), tmp_path / "d")
    _, still = Generator(drifting(drift=0.0)).samples(900, 100)
    generator = Generator(drifting())
    rows, logits = generator.samples(850, 150)
    assert truth["test"]["auc"] == pytest.approx(true_auc(logits, rows.labels), abs=1e-3)
    assert np.abs(logits[50:] - still).mean() > 0.3
    with_bags, _ = Generator(drifting(multi_hot=True, history=5)).samples(850, 150)
    assert {"C3", "history"} <= with_bags.bags.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"raw": False}, "drift without raw ids"), ({"drift": 1.5}, "share of 1.5"),
     ({"drift_every": 0}, "every 0 samples")],
)  # fmt: skip
def test_drift_that_makes_no_sense(changes, message):
    with pytest.raises(ConfigError, match=message):
        Generator(drifting(**changes))
