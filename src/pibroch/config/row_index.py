"""Which row of its table an id has, by name: ``[embedding.rows]`` of a recipe."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pibroch.config.registry import Choice, Registry, Spec

ROW_INDICES = Registry(
    "row index",
    "pibroch.row_indices",
    Spec,
    "pibroch.embedding:IndexKind",
    ["pibroch.config.row_index:SPECS"],
)


class RowIndexConfig(Choice):
    """Settings of a kind of row index; each adds its own, which its class takes by name."""

    registry: ClassVar[Registry[Spec]] = ROW_INDICES

    name: str = "identity"

    def num_rows(self, num_ids: int | None) -> int | None:
        """Rows of a table whose column has so many ids in the data, ``None`` where ids are raw.

        There are as many, unless a kind with a capacity of its own says otherwise.
        """
        return num_ids

    def options(self) -> dict[str, Any]:
        """What the kind is made from."""
        return self.model_dump(exclude={"name"})


class IdentityConfig(RowIndexConfig):
    """Ids are rows: nothing to choose."""

    name: Literal["identity"] = "identity"


class HashedConfig(RowIndexConfig):
    """Any int64 is an id, and is given a row as steps bring it: for raw ids.

    Attributes:
        capacity: rows of each table, or as many as its column has ids, where these are fewer.
        admit_after: an id is given a row in the step in which it has been seen so often.
        sketch: count ids without a row about, in four bytes a row of the table; else exactly.
        evict: who loses a row when there are too few: ``least_recent``, not seen for longest, or
            ``least_frequent``, seen least often.
        half_life: ``least_frequent``: steps after which all counts are halved; never when absent.
        expire_after: an id that is not seen for so many steps loses its row; never when absent.
        expire_after_seconds: the same in event time, where the data have one.
        unknown_row: ids without a row read and train the table's first one, which they share; else
            they are absent from their bags.
    """

    name: Literal["hashed"] = "hashed"
    capacity: int = Field(ge=1, lt=1 << 31)
    admit_after: int = Field(default=1, ge=1)
    sketch: bool = False
    evict: Literal["least_recent", "least_frequent"] = "least_recent"
    half_life: int | None = Field(default=None, ge=1)
    expire_after: int | None = Field(default=None, ge=1)
    expire_after_seconds: float | None = Field(default=None, ge=0.016)
    unknown_row: bool = False

    @model_validator(mode="after")
    def _has_counts(self) -> Self:
        if self.half_life is not None and self.evict != "least_frequent":
            raise ValueError('takes `half_life` with `evict = "least_frequent"`, which counts')
        return self

    def num_rows(self, num_ids: int | None) -> int:
        """See :class:`RowIndexConfig`."""
        return self.capacity if num_ids is None else min(self.capacity, num_ids)

    def options(self) -> dict[str, Any]:
        """See :class:`RowIndexConfig`; the table itself knows its capacity."""
        return self.model_dump(exclude={"name", "capacity"})


SPECS = (
    Spec("identity", "ids are rows", IdentityConfig, "pibroch.embedding:Identity"),
    Spec(
        "hashed",
        "any int64 is an id, and is given a row as steps bring it",
        HashedConfig,
        "pibroch.embedding:Hashed.of_recipe",
    ),
)
