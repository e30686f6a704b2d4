import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from pibroch.cli.profile_sources import make_profile, name_rows
from pibroch.errors import ConfigError, DataError
from pibroch.planner.count import CountOptions
from pibroch.planner.extrapolate import extrapolate
from pibroch.planner.profile import AccessProfile, TableCounts
from pibroch.planner.sketch import DecayingSketch
from pibroch.planner.trace import count_trace
from planner_cases import zipf_profile

REAL = Path(os.environ.get("PIBROCH_TEST_DATA", Path(__file__).parents[4] / "shared" / "data"))


def zipf_ids(size, num_rows=5000, seed=0, exponent=1.2):
    share = 1 / np.arange(1, num_rows + 1) ** exponent
    return np.random.default_rng(seed).choice(num_rows, size, p=share / share.sum())


@pytest.mark.parametrize("packed", [False, True])
def test_traces_plain_and_packed(tmp_path, packed, monkeypatch):
    monkeypatch.setattr("pibroch.planner.trace.PIECE_BYTES", 1000)
    ids = zipf_ids(2500)
    text = "".join(f"{i}\n" for i in ids).encode()
    path = tmp_path / "some.txt.gz"
    path.write_bytes(gzip.compress(text) if packed else text)
    profile = count_trace(path, 5000, batch_size=400)
    assert (
        profile.num_samples == 2500
        and profile.num_batches == 7
        and list(profile.tables) == ["some"]
    )
    assert profile.tables["some"].accesses.tolist() == np.bincount(ids, minlength=5000).tolist()
    batches = sum(
        np.bincount(np.unique(ids[start : start + 400]), minlength=5000)
        for start in range(0, 2500, 400)
    )
    assert profile.tables["some"].batches.tolist() == batches.tolist()
    assert profile.fingerprint == count_trace(path, 5000, 7).fingerprint
    assert profile.num_rows == {"some": 5000} and count_trace(path).num_rows == {
        "some": int(ids.max()) + 1
    }


def test_bad_lines_are_named(tmp_path):
    path = tmp_path / "t.txt"
    for text, message in (
        ("1\n2\nx3\n", "line 3: b'x3'"),
        ("1\n9\n", "line 2: index 9"),
        ("3\n-1\n", "line 2: index -1"),
        ("", "empty"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            count_trace(path, 5)
    path.write_bytes(gzip.compress(b"1\n2\n" * 1000)[:-20])
    with pytest.raises(DataError, match="ends too early"):
        count_trace(path, 5)


@pytest.mark.skipif(not (REAL / "dlrm_trace_low_500k.txt.gz").exists(), reason="no ../shared/data")
def test_a_real_trace():
    profile = count_trace(REAL / "dlrm_trace_low_500k.txt.gz", 500_000)
    assert profile.num_accesses == profile.num_samples == 379_910


def test_what_a_source_is(tmp_path):
    options = CountOptions(batch_size=100)

    def quiet(stage, fraction):
        return None

    (tmp_path / "t.txt").write_text("1\n0\n1\n")
    trace = make_profile(tmp_path / "t.txt", options, {"": 4}, None, quiet)
    assert trace.tables["t"].accesses.tolist() == [1, 2, 0, 0]
    trace.save(tmp_path / "t.profile")
    larger = make_profile(tmp_path / "t.profile", options, {"": 30}, 300, quiet)
    assert larger.num_rows == {"t": 30} and larger.num_samples == 300
    with pytest.raises(DataError, match="not there"):
        make_profile(tmp_path / "none", options, {}, None, quiet)
    assert name_rows(["C3=7", "12"]) == {"C3": 7, "": 12}
    for wrong in ("C3=", "x", "0"):
        with pytest.raises(ConfigError, match="--rows"):
            name_rows([wrong])


def test_thinning_an_extrapolated_profile_gives_the_sample_back():
    full = zipf_profile({"a": 200_000, "b": 400}, 2_000_000, exponent=1.0, seed=3)
    share = 0.02
    rng = np.random.default_rng(5)
    seen = {name: rng.binomial(counts.accesses, share) for name, counts in full.tables.items()}
    sample = AccessProfile(
        {n: TableCounts(a, np.minimum(a, 9).astype(np.int32)) for n, a in seen.items()},
        40_000,
        157,
        256,
        "sample",
    )
    made = extrapolate(sample, 2_000_000, {"a": 200_000})
    assert made.num_rows == full.num_rows and made.num_samples == 2_000_000
    rng = np.random.default_rng(1)
    for name, counts in made.tables.items():
        again = rng.binomial(counts.accesses, share)
        assert made.tables[name].accesses.sum() == pytest.approx(
            full.tables[name].accesses.sum(), rel=0.03
        )
        if name == "b":
            continue
        before, after = (np.bincount(np.minimum(counts, 200)) for counts in (seen[name], again))
        for times in range(1, 8):
            assert (
                abs(int(before[times]) - int(after[times]))
                <= 5 * np.sqrt(before[times]) + 0.02 * before[times]
            )
        assert (again > 0).sum() == pytest.approx((seen[name] > 0).sum(), rel=0.02)
        for top in (10, 100, 1000):
            shares = [
                np.sort(counts)[::-1][:top].sum() / counts.sum() for counts in (seen[name], again)
            ]
            assert shares[1] == pytest.approx(shares[0], rel=0.05)
        true, guess = (np.sort(p.tables[name].accesses)[::-1].cumsum() for p in (full, made))
        places = [100, 1000, 10_000, 50_000, 150_000]
        np.testing.assert_allclose(guess[places] / guess[-1], true[places] / true[-1], rtol=0.05)
    occurs = made.tables["a"].batches
    accesses = made.tables["a"].accesses
    assert (
        (occurs <= accesses).all()
        and (occurs[accesses > 0] >= 1).all()
        and occurs.max() <= made.num_batches
    )


def test_extrapolation_refuses_what_cannot_be():
    profile = zipf_profile({"a": 50}, 500)
    for arguments, message in (
        ((100,), "at least the profile's 500"),
        ((900, {"x": 3}), "'x'"),
        ((900, {"a": 3}), "were seen"),
    ):
        with pytest.raises(ConfigError, match=message):
            extrapolate(profile, *arguments)
    same = extrapolate(profile, 500)
    assert (
        np.sort(same.tables["a"].accesses).tolist()
        == np.sort(profile.tables["a"].accesses).tolist()
    )


@pytest.mark.parametrize("capacity", [50, 400, 10_000])
def test_a_sketch_is_never_too_high_and_too_low_by_its_error_at_most(capacity):
    sketch = DecayingSketch({"a": 5000, "b": 10}, capacity)
    ids = zipf_ids(40_000)
    for start in range(0, 40_000, 1000):
        part = ids[start : start + 1000]
        sketch.add({"a": [part[:400], part[400:]], "b": [part % 10]}, 1000)
        assert sketch.num_counters <= capacity
    result = sketch.profile(1000)
    assert result.num_samples == 40_000 and result.num_batches == 40
    for name, true in (
        ("a", np.bincount(ids, minlength=5000)),
        ("b", np.bincount(ids % 10, minlength=10)),
    ):
        guess = result.tables[name].accesses
        assert (guess <= true + 0.5).all() and (guess >= true - sketch.error - 0.5).all()
    assert sketch.error <= 80_000 / (capacity + 1)
    if capacity == 10_000:
        assert sketch.error == 0


def test_a_sketch_forgets():
    sketch = DecayingSketch({"a": 100}, 20, half_life=5)
    for batch in range(4000):
        sketch.add({"a": [np.full(10, batch // 2000)]}, 10)
    result = sketch.profile(10)
    assert result.tables["a"].accesses[0] == 0
    assert result.tables["a"].accesses[1] == pytest.approx(10 / (1 - 0.5**0.2), rel=0.02)
    assert result.num_batches == result.tables["a"].batches[1] == round(1 / (1 - 0.5**0.2))
    with pytest.raises(ConfigError, match="capacity 0"):
        DecayingSketch({"a": 1}, 0)
