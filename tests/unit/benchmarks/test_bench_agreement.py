import math

import pytest
from benchmarks.agreement import TOLERANCE, compare
from benchmarks.contender import BenchmarkError

RIGHT = {"loss": [0.7, 0.6], "row_movement": [10.0, 9.0]}


def test_equal_series_agree():
    agreement = compare({"a": RIGHT, "b": RIGHT, "c": RIGHT})
    assert agreement.largest == {"loss": 0.0, "row_movement": 0.0}
    assert "3 contenders agree" in str(agreement)


def test_a_difference_within_rounding_is_reported():
    agreement = compare({"a": RIGHT, "b": RIGHT | {"loss": [0.7, 0.6 * (1 + 3e-5)]}})
    assert agreement.largest["loss"] == pytest.approx(3e-5, rel=1e-6)


@pytest.mark.parametrize("series", ["loss", "row_movement"])
@pytest.mark.parametrize("excess", [3.0, -3.0, math.nan, math.inf])
def test_a_red_check_names_series_step_and_contender(series, excess):
    first, second = RIGHT[series]
    wrong = RIGHT | {series: [first, second * (1 + excess * TOLERANCE[series])]}
    with pytest.raises(BenchmarkError, match=rf"{series} .* from b but .* from a in step 1"):
        compare({"a": RIGHT, "b": wrong})


def test_a_missing_step_is_no_agreement():
    with pytest.raises(ValueError):
        compare({"a": RIGHT, "b": RIGHT | {"loss": [0.7]}})
