"""Where the samples come from: an encoded dataset, or options to generate one."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AliasChoices, Field, model_validator

from pibroch.config.base import Section
from pibroch.config.kafka import SettingsOfRecipe, check_settings


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


class StreamConfig(Section):
    """Events that come while training goes on, see ``docs/streams.md``.

    Attributes:
        kind: where they come from.
        path: the directory that grows.
        brokers: of Kafka, ``host:port``, several between commas.
        topic: at these.
        kafka: further settings of librdkafka, such as for encryption; a secret among them by
            ``{ env = NAME }`` or ``{ file = PATH }``.
        format: of its files, by their names when absent; or of messages, ``jsonl`` when absent.
        partitions: of a directory: how many, to which files go by their names; or sub-directories,
            each of which is one. No more ranks read than there are partitions.
        schema_file: the schema of the records, in TOML; that of ``data.dir`` when absent.
        time: the column with the time of an event, in place of the schema's.
        time_unit: of these numbers, in place of the schema's.
        follow: wait for more when all is trained, without end.
        until_idle: end when nothing has come for so many seconds; needs ``follow``.
        wait_seconds: how long an event waits at most for a batch to fill.
        most_bad_share: of bad records; more end the run. Ten are always allowed for each 0.001.
        most_record_bytes: a longer record is bad.
        skip: records that are set aside though they look good, ``FILE:LINE``; for good, once a
            process has gone on with them.
        bad_records: a folder for them; ``stream/bad`` in the run directory when absent.
    """

    kind: Literal["directory", "kafka"] = "directory"
    path: str | None = None
    brokers: str | None = None
    topic: str | None = None
    kafka: SettingsOfRecipe = Field(default_factory=dict)
    format: Literal["csv", "tsv", "jsonl", "parquet"] | None = None
    partitions: Annotated[int, Field(ge=1, le=4096)] | tuple[str, ...] = 8
    schema_file: str | None = None
    time: str | None = None
    time_unit: Literal["s", "ms", "us", "ns"] | None = None
    follow: bool = False
    until_idle: float | None = Field(default=None, ge=0)
    wait_seconds: float = Field(default=0.5, ge=0)
    most_bad_share: float = Field(default=1e-3, ge=0, le=1)
    most_record_bytes: int = Field(default=1 << 20, ge=1 << 10, le=1 << 26)
    skip: tuple[Annotated[str, Field(pattern=r"^.+:\d+$")], ...] = ()
    bad_records: str | None = None

    @property
    def idle_seconds(self) -> float | None:
        """Without an event, after which the run ends; ``None`` for never."""
        return self.until_idle if self.follow else 0.0

    @model_validator(mode="after")
    def _place(self) -> Self:
        if self.kind == "directory" and self.path is None:
            raise ValueError("needs `path`, the directory that grows")
        if self.kind == "kafka" and (self.brokers is None or self.topic is None):
            raise ValueError("needs `brokers` and `topic` for Kafka")
        check_settings(self.kafka)
        if self.kind == "kafka" and self.format == "parquet":
            raise ValueError("takes messages in `jsonl`, `csv` or `tsv`, not in Parquet")
        if not self.partitions:
            raise ValueError("needs at least one of `partitions`")
        return self


class DataConfig(Section):
    """The ``[data]`` table.

    Attributes:
        dir: an encoded dataset, relative to the working directory.
        prepare: the command that makes ``dir``; shown when it is missing.
        synthesize: generate data when ``dir`` is not given.
        stream: train on events as they come; ``dir`` then gives the schema, vocabularies, and
            samples to validate and test with.
        processors: data processors that make the batches in place of the ranks; started on this
            machine with the run, unless ``rendezvous`` says where they are.
        rendezvous: ``tcp://host:port`` of processors that run already, see ``pibroch data-processor
            --help``.
    """

    dir: str | None = None
    prepare: str | None = None
    synthesize: SynthesizeConfig | None = None
    stream: StreamConfig | None = None
    processors: int = Field(default=0, ge=0)
    # `meet` is its former name
    rendezvous: str | None = Field(
        default=None, validation_alias=AliasChoices("rendezvous", "meet")
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.stream is not None:
            return self._checked_stream(self.stream)
        if self.dir is None and self.synthesize is None:
            raise ValueError("needs `dir` (an encoded dataset) or a [data.synthesize] table")
        return self

    def _checked_stream(self, stream: StreamConfig) -> Self:
        if (self.dir is None) == (stream.schema_file is None):
            raise ValueError("needs `dir` or `stream.schema_file`, whose schema the stream has")
        if self.processors:
            raise ValueError("takes no `processors` with a stream, which ranks read themselves")
        return self

    @model_validator(mode="after")
    def _somebody_there(self) -> Self:
        if self.rendezvous is not None and not self.processors:
            raise ValueError(
                "takes `rendezvous` with `processors`, the number of those that meet there"
            )
        return self
