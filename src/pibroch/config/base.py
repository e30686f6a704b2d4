"""The base of all configuration sections: frozen, and unknown keys are errors."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
