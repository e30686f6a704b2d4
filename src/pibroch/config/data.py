"""Where the samples come from: an encoded dataset, or options to generate one."""

from __future__ import annotations

from typing import Self

from pydantic import AliasChoices, Field, model_validator

from pibroch.config.base import Section


class SynthesizeConfig(Section):
    """Criteo-shaped data with planted truth; made once and kept in the cache folder.

    Attributes:
        rows: samples over all splits.
        seed: the data are the same for the same settings.
        max_table_rows: Criteo's tables, none larger than this.
        multi_hot: every third category holds zero to several ids.
        history: of up to so many items a sample has a sequence, ``history``, which reads the table
            of C2; 0 for none.
        raw: ids are keys, as in a data set with ``encoding = "raw"``.
    """

    rows: int = Field(default=200_000, ge=1_000)
    seed: int = Field(default=0, ge=0)
    max_table_rows: int = Field(default=10_000, ge=1)
    multi_hot: bool = False
    history: int = Field(default=0, ge=0, le=1 << 16)
    raw: bool = False


class DataConfig(Section):
    """The ``[data]`` table.

    Attributes:
        dir: an encoded dataset, relative to the working directory.
        prepare: the command that makes ``dir``; shown when it is missing.
        synthesize: generate data when ``dir`` is not given.
        processors: data processors that make the batches in place of the ranks; started on this
            machine with the run, unless ``rendezvous`` says where they are.
        rendezvous: ``tcp://host:port`` of processors that run already, see ``pibroch data-processor
            --help``.
    """

    dir: str | None = None
    prepare: str | None = None
    synthesize: SynthesizeConfig | None = None
    processors: int = Field(default=0, ge=0)
    # `meet` is its former name
    rendezvous: str | None = Field(
        default=None, validation_alias=AliasChoices("rendezvous", "meet")
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.dir is None and self.synthesize is None:
            raise ValueError("needs `dir` (an encoded dataset) or a [data.synthesize] table")
        return self

    @model_validator(mode="after")
    def _somebody_there(self) -> Self:
        if self.rendezvous is not None and not self.processors:
            raise ValueError(
                "takes `rendezvous` with `processors`, the number of those that meet there"
            )
        return self
