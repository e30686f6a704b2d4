"""Schemas of well-known click logs, inferred from the first lines of a file."""

from __future__ import annotations

from collections.abc import Sequence

from pibroch.data.schema import CategoricalFeature, DenseFeature, Schema
from pibroch.errors import DataError

NUM_CRITEO_DENSE = 13
NUM_CRITEO_CATEGORICAL = 26


def criteo_schema(*, bins: bool = True, min_count: int = 2) -> Schema:
    """The Criteo Display Advertising and 1 TB logs: a label, 13 integers and 26 hashed categories.

    Fields are separated by tabs, and there is no header.

    Args:
        bins: give each integer a second life as a category, ``I1_bin`` and so on: F = 39 instead of
            26.
        min_count: frequency cut of the 26 vocabularies.
    """
    integers = [f"I{i}" for i in range(1, NUM_CRITEO_DENSE + 1)]
    categories = [f"C{i}" for i in range(1, NUM_CRITEO_CATEGORICAL + 1)]
    plain = [CategoricalFeature(name=name, column=name, min_count=min_count) for name in categories]
    binned = [
        CategoricalFeature(name=f"{name}_bin", column=name, binning="log")
        for name in integers
        if bins
    ]
    return Schema(
        label="label",
        columns=("label", *integers, *categories),
        separator="\t",
        quotes=False,
        dense=tuple(DenseFeature(name=name, column=name) for name in integers),
        categorical=(*plain, *binned),
    )


def criteo_npy_schema(*, min_count: int = 2) -> Schema:
    """The arrays of ``torchrec.datasets.criteo``, whose dense values have their logarithm taken.

    Args:
        min_count: frequency cut of the 26 vocabularies.
    """
    schema = criteo_schema(bins=False, min_count=min_count)
    dense = tuple(each.model_copy(update={"transform": "identity"}) for each in schema.dense)
    return schema.model_copy(update={"dense": dense})


def avazu_schema(
    header: Sequence[str], first_record: Sequence[str], *, min_count: int = 2
) -> Schema:
    """The Avazu log, which has no dense features.

    All but the label ``click`` and the unique ``id`` is a category.

    Args:
        header: the file's column names.
        first_record: its first record, which shows whether ``hour`` is ``yymmddhh`` (then only
            ``hh`` is used) or ``hh``.
        min_count: frequency cut of all vocabularies.

    Raises:
        DataError: when the header is not Avazu's.
    """
    if "click" not in header or "hour" not in header:
        raise DataError(
            f"the columns {', '.join(header)[:80]}",
            "Avazu's header with `click` and `hour`",
            "use `pibroch data prepare csv --schema FILE`",
        )
    long_hour = len(dict(zip(header, first_record, strict=False)).get("hour", "")) == len(
        "yymmddhh"
    )

    def feature(column: str) -> CategoricalFeature:
        characters = (6, 8) if column == "hour" and long_hour else None
        return CategoricalFeature(
            name=column, column=column, min_count=min_count, characters=characters
        )

    return Schema(
        label="click",
        categorical=tuple(feature(column) for column in header if column not in ("click", "id")),
    )
