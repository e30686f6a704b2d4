"""Correctness first: contenders that do not compute the same thing are not compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cases import CHECK_STEPS
from benchmarks.contender import BenchmarkError, Competitor

TOLERANCE = {"loss": 1e-4, "pooled": 1e-5, "row_movement": 1e-2}
"""Largest relative difference within rounding, by the first word of a series.

Row movement is looser: where a gradient is rounding noise around zero, Adagrad's first step is ±lr
by its sign alone. A lost or doubled update changes it by far more.
"""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The largest relative difference of each series, over all contenders of a case."""

    contenders: tuple[str, ...]
    largest: dict[str, float]

    def __str__(self) -> str:
        differences = ", ".join(f"{series} {value:.1e}" for series, value in self.largest.items())
        return (
            f"{len(self.contenders)} contenders agree over {CHECK_STEPS} steps; largest relative"
            f" difference: {differences}"
        )


def check_agreement(contenders: Sequence[Competitor]) -> Agreement:
    """Check that all contenders compute the same.

    They take the same steps from the same weights, and every series is compared with the first
    one's.

    Raises:
        BenchmarkError: when a difference exceeds its tolerance or a value is not finite.
    """
    values = {contender.spec.label: contender.check(CHECK_STEPS) for contender in contenders}
    return compare(values)


def compare(values: dict[str, dict[str, list[float]]]) -> Agreement:
    """Compare ``contender -> series -> values``; the first contender is the reference.

    >>> print(compare({"a": {"loss": [1.0]}, "b": {"loss": [1.00001]}}).largest)
    {'loss': 1.0000000000065512e-05}
    """
    reference_label, reference = next(iter(values.items()))
    largest = dict.fromkeys(reference, 0.0)
    for label, series_of in values.items():
        for series, expected in reference.items():
            for step, (value, right) in enumerate(zip(series_of[series], expected, strict=True)):
                difference = abs(value - right) / max(abs(right), 1e-12)
                if not difference <= TOLERANCE[series.partition(" ")[0]]:
                    raise BenchmarkError(
                        f"{series} {value:.8g} from {label} but {right:.8g} from {reference_label}"
                        f" in step {step}",
                        f"a relative difference of at most {TOLERANCE[series.partition(' ')[0]]:g}",
                        "nothing is reported until all contenders compute the same; run the test"
                        " suite first",
                    )
                largest[series] = max(largest[series], difference)
    return Agreement(tuple(values), largest)
