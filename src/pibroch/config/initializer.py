"""The initial weights of embedding rows, by name: ``[embedding.init]`` of a recipe."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from pibroch.config.registry import Choice, Registry, Spec

INITIALIZERS = Registry(
    "initializer",
    "pibroch.initializers",
    Spec,
    "pibroch.embedding:Initializer",
    ["pibroch.config.initializer:SPECS"],
)


class InitializerConfig(Choice):
    """Settings of an initializer; each adds its own, which its class takes by name."""

    registry: ClassVar[Registry[Spec]] = INITIALIZERS

    def options(self, num_first_order: int) -> dict[str, Any]:
        """What the initializer is made from.

        The last ``num_first_order`` columns of a row are no embedding but first-order weights, see
        ``table_dim`` of a model; an initializer may treat them apart.
        """
        return self.model_dump(exclude={"name"})


class UniformConfig(InitializerConfig):
    """Uniform in ``[-bound, bound]``.

    When ``bound`` is absent, it is ``1 / sqrt(num_rows)`` of each table.
    """

    name: Literal["uniform"] = "uniform"
    bound: float | None = Field(default=None, gt=0)


class NormalConfig(InitializerConfig):
    """Normal with mean 0; first-order weights begin with 0."""

    name: Literal["normal"] = "normal"
    std: float = Field(default=0.01, gt=0)

    def options(self, num_first_order: int) -> dict[str, Any]:
        """See :class:`InitializerConfig`."""
        return {"std": self.std, "zero_columns": num_first_order}


class ZerosConfig(InitializerConfig):
    """All zeros."""

    name: Literal["zeros"] = "zeros"


SPECS = (
    Spec("uniform", "uniform around 0", UniformConfig, "pibroch.embedding:Uniform"),
    Spec("normal", "normal with mean 0", NormalConfig, "pibroch.embedding:Normal"),
    Spec("zeros", "all zeros", ZerosConfig, "pibroch.embedding:Zeros"),
)
