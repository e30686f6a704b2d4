from collections import Counter

import numpy as np
import pytest

from pibroch.data.vocabulary import CodeCounter


def expected(codes: np.ndarray, min_count: int) -> list[tuple[int, int]]:
    counts = [
        (code, count) for code, count in Counter(codes.tolist()).items() if count >= min_count
    ]
    return sorted(counts, key=lambda pair: (-pair[1], pair[0]))


@pytest.mark.parametrize("memory_codes", [50, 500, 100_000])
@pytest.mark.parametrize("min_count", [1, 3])
def test_counts_are_exact_however_little_memory_there_is(tmp_path, memory_codes, min_count):
    rng = np.random.default_rng(0)
    codes = (rng.zipf(1.3, 20_000) % 3000).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    counter = CodeCounter(tmp_path, memory_codes)
    for piece in np.array_split(codes, 37):
        counter.add(piece)
    frequent, counts = counter.most_frequent(min_count)
    assert list(zip(frequent.tolist(), counts.tolist(), strict=True)) == expected(codes, min_count)
    assert (counter.num_runs > 0) == (memory_codes < 3000)
    top, _ = counter.most_frequent(min_count, 10)
    assert top.tolist() == frequent[:10].tolist()
    counter.close()
    assert not list(tmp_path.iterdir())


def test_the_largest_code_and_nothing_at_all(tmp_path):
    counter = CodeCounter(tmp_path, 1)
    assert len(counter.most_frequent(1)[0]) == 0
    codes = np.array([2**64 - 1, 0, 2**64 - 1, 2**63], np.uint64)
    counter.add(codes)
    assert counter.num_runs
    assert counter.most_frequent(1)[0].tolist() == [2**64 - 1, 0, 2**63]
