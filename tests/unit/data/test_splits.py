import numpy as np
import pytest

from pibroch.data.splits import SplitRule
from pibroch.errors import ConfigError


def test_time_split_keeps_the_order():
    assigned = SplitRule.parse("time:0.7/0.15/0.15").assign(0, 1000, 1000)
    assert np.bincount(assigned).tolist() == [700, 150, 150]
    assert (np.diff(assigned.astype(int)) >= 0).all()


def test_hash_split_mixes_by_seed():
    first, second = (
        SplitRule.parse("hash:0.8/0.1/0.1", seed).assign(0, 20_000, 20_000) for seed in (0, 1)
    )
    shares = np.bincount(first) / len(first)
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.01)
    assert (first != second).any()
    assert len(set(first[:100].tolist())) == 3


@pytest.mark.parametrize("text", ["time", "hash:0.8/0.1/0.1", "none"])
def test_pieces_give_what_the_whole_gives(text):
    rule = SplitRule.parse(text)
    whole = rule.assign(0, 1001, 1001)
    pieces = [rule.assign(start, min(77, 1001 - start), 1001) for start in range(0, 1001, 77)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert text != "none" or not whole.any()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "random",
        "time:0.5/0.5",
        "time:0.5/0.2/0.2",
        "hash:a/b/c",
        "time:0/0.5/0.5",
        "time:1.2.3/0/0",
    ],
)
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigError, match="split"):
        SplitRule.parse(text)
