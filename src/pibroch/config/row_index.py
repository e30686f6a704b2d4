"""Which row of its table an id has, by name: ``[embedding.rows]`` of a recipe."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

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


SPECS = (Spec("identity", "ids are rows", IdentityConfig, "pibroch.embedding:Identity"),)
