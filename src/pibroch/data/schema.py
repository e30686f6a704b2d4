"""What the columns of a click log mean: labels, dense features and categorical features.

A schema is written as TOML::

    label = "clicked"             # or several: labels = ["clicked", "bought"]
    weight = "importance"         # of a sample in the loss; 1 when absent

    [dense.price]                 # the table's name is the feature's; `column` defaults to it
    [categorical.user]
    encoding = "hash"
    num_buckets = 1_000_000
    [categorical.tags]
    multi_hot = true
    delimiter = "|"
    [categorical.history]         # the last 50 items, which read the table of `item`
    multi_hot = true
    max_length = 50
    shares = "item"
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from pibroch.config.base import Section
from pibroch.config.toml import to_toml
from pibroch.data.transform import FIRST_ROW, Binning, Bounds, Transform, num_bin_rows
from pibroch.data.values import TEXT_RULES
from pibroch.errors import ConfigError

Encoding = Literal["vocabulary", "hash", "integer", "raw"]
_S = TypeVar("_S", bound=Section)
_NO_SEPARATORS = '"\n\r'
_OF_TABLE = ("encoding", "min_count", "max_rows", "num_buckets", "binning")
"""What features that read one table have in common."""
_NAME = re.compile(r"[A-Za-z0-9_-]+")


class DenseFeature(Section):
    """A number that the model reads as such.

    Attributes:
        name: letters, digits, ``_`` and ``-``.
        column: the column it comes from.
        transform: see :func:`pibroch.data.transform.transform_dense`.
        mean: taken from what the transform gives, a missing value's 0 among it.
        std: divides what is left.
    """

    name: str
    column: str
    transform: Transform = "log"
    mean: float = Field(default=0.0, allow_inf_nan=False)
    std: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    @property
    def is_standardised(self) -> bool:
        """Whether ``mean`` and ``std`` change anything."""
        return self.mean != 0 or self.std != 1


class Events(Section):
    """A log whose records are events: a user's earlier ones are a sequence.

    Attributes:
        item: the column of what the sequence is made of.
        user: the column that tells whose events they are.
        time: a column of numbers; only events of earlier times count. The records' order when
            absent.
        clicks: only events with label 1 count.
    """

    item: str
    user: str
    time: str | None = None
    clicks: bool = False

    def columns(self, numeric: bool) -> tuple[str, ...]:
        """The columns that are read, those of numbers or those of text."""
        times = () if self.time is None else (self.time,)
        return times if numeric else (self.item, self.user)


class CategoricalFeature(Section):
    """A value that selects rows of a table. Row 0 is for unknown values, row 1 for a missing one.

    Attributes:
        name: letters, digits, ``_`` and ``-``.
        column: the column it comes from.
        encoding: ``vocabulary`` gives a row to each value seen in training, ``hash`` spreads all
            values over ``num_buckets`` rows, ``integer`` takes whole numbers below ``num_buckets``
            as they are. ``raw`` gives no rows but keys, see :func:`pibroch.data.encode.raw_ids`,
            which a table that learns its ids turns into rows.
        min_count: vocabulary: values seen less often in the training split are unknown.
        max_rows: vocabulary: at most this many rows, those of the most frequent values.
        num_buckets: hash and integer.
        binning: reads the column as a number and takes its bin instead of an encoding: ``log``,
            ``hour`` or ``weekday`` of Unix seconds, or rising bounds, see
            :func:`pibroch.data.transform.bin_rows`.
        multi_hot: the column holds any number of values in their order, separated by
            ``delimiter``.
        delimiter: one ASCII character.
        max_length: of more values, only so many are kept, the last ones.
        shares: the feature whose table, dictionary and encoding this one has, too.
        events: have preparation build the sequence from a user's earlier records, in place of a
            column that has it.
        characters: use only ``value[first:end]``, as the hour in ``yymmddhh``; ``0 <= first <
            end``, in characters.
    """

    name: str
    column: str
    encoding: Encoding = "vocabulary"
    min_count: int = Field(default=2, ge=1)
    max_rows: int | None = Field(default=None, ge=FIRST_ROW)
    num_buckets: int | None = Field(default=None, ge=1, le=2**31 - 1 - FIRST_ROW)
    binning: Binning | Bounds | None = None
    multi_hot: bool = False
    delimiter: str = Field(default="|", min_length=1, max_length=1)
    max_length: int | None = Field(default=None, ge=1)
    shares: str | None = None
    events: Events | None = None
    characters: tuple[int, int] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.encoding in ("hash", "integer") and self.num_buckets is None:
            raise ValueError(f"`num_buckets` for the {self.encoding} encoding of `{self.name}`")
        if self.encoding == "raw":
            sizes = ("num_buckets", "max_rows", "binning")
            if odd := [name for name in sizes if getattr(self, name) is not None]:
                raise ValueError(f"no `{odd[0]}` for the raw ids of `{self.name}`")
        if self.binning is not None and self.multi_hot:
            raise ValueError(f"`{self.name}` either binned or multi_hot, not both")
        if isinstance(self.binning, tuple) and not _rise(self.binning):
            raise ValueError(f"bounds that rise for the binning of `{self.name}`")
        if self.max_length is not None and not self.multi_hot:
            raise ValueError(f"`multi_hot = true` with the `max_length` of `{self.name}`")
        if self.events is not None and self.max_length is None:
            raise ValueError(f"`max_length` for the sequence `{self.name}` of events")
        if self.characters is not None and not 0 <= self.characters[0] < self.characters[1]:
            raise ValueError(f"`characters` of `{self.name}` as [FIRST, END] with 0 <= FIRST < END")
        return self

    @property
    def is_raw(self) -> bool:
        """Whether its ids are keys: any int64, and no rows of a table."""
        return self.encoding == "raw"

    @property
    def has_vocabulary(self) -> bool:
        """Whether its rows are those of a dictionary, counted from data."""
        return self.binning is None and self.encoding == "vocabulary"

    @property
    def is_of_time(self) -> bool:
        """Whether its column holds Unix seconds."""
        return self.binning in ("hour", "weekday")

    @property
    def table(self) -> str:
        """The name of the table that it reads."""
        return self.shares or self.name

    @property
    def fixed_num_rows(self) -> int | None:
        """Rows of the table where the schema alone decides it, else ``None``."""
        if self.binning is not None:
            return num_bin_rows(self.binning)
        if self.num_buckets is None or self.encoding == "vocabulary":
            return None
        return self.num_buckets + FIRST_ROW


class Target(Section):
    """What a label holds.

    Attributes:
        kind: ``binary`` is 0 or 1, ``number`` any finite number, for regression.
        values: the number that each text of the column stands for, e.g. ``{"-1" = 0, "1" = 1}``;
            the text itself when empty.
    """

    kind: Literal["binary", "number"] = "binary"
    values: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _numbers(self) -> Self:
        for text, number in self.values.items():
            if not math.isfinite(number) or (self.kind == "binary" and number not in (0, 1)):
                need = "0 or 1" if self.kind == "binary" else "a finite number"
                raise ValueError(f"{need} for {text!r} in `values`, not {number}")
        return self


_BINARY = Target()


class Schema(Section):
    """The columns of a click log.

    Attributes:
        label: the column that is predicted.
        labels: instead, several of them.
        target: by label what it holds; 0 and 1 where absent.
        weight: the column with each sample's weight in the loss, a number of at least 0.
        group: the column whose values say which samples are ranked among each other, as those of a
            user or of a query.
        time: the column with the time of each sample's event, a number since 1970 (UTC).
        time_unit: of these numbers.
        dense: the n dense features, in the order of ``JaggedBatch.dense``; may be empty.
        categorical: the F categorical features, in the order of ``JaggedBatch.keys``.
        columns: names of all columns of a text file without header, ``None`` where the file has
            one.
        separator: one ASCII character between the columns of a text file.
        quotes: whether fields of a text file may stand in double quotes.
        nulls: texts that stand for a missing value in all columns but the label's, and for missing
            items.
        text_rules: the version of the rules by which typed values become text and ``characters``
            are counted. What was prepared before there were several has 1: whole floats keep their
            ``.0``, NaN is a value of its own in Parquet, and ``characters`` are bytes.
    """

    label: str | None = None
    labels: tuple[str, ...] = ()
    target: dict[str, Target] = Field(default_factory=dict)
    weight: str | None = None
    group: str | None = None
    time: str | None = None
    time_unit: Literal["s", "ms", "us", "ns"] = "s"
    columns: tuple[str, ...] | None = None
    separator: str = Field(default=",", min_length=1, max_length=1)
    quotes: bool = True
    nulls: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    text_rules: Literal[1, 2] = TEXT_RULES
    dense: tuple[DenseFeature, ...] = ()
    categorical: tuple[CategoricalFeature, ...]

    @field_validator("categorical")
    @classmethod
    def _with_shared(cls, features: tuple[CategoricalFeature, ...]) -> tuple[Any, ...]:
        """Give features that share a table what those that own it say of it."""
        owners = {feature.name: feature for feature in features if feature.shares is None}
        return tuple(
            each if each.shares is None else _sharing(each, owners.get(each.shares))
            for each in features
        )

    @model_validator(mode="after")
    def _names(self) -> Self:
        for kind, names in (("dense", self.dense_names), ("categorical", self.keys)):
            if twice := {name for name, uses in Counter(names).items() if uses > 1}:
                raise ValueError(
                    f"different names, `{min(twice)}` is the name of two {kind} features"
                )
            if odd := [name for name in names if not _NAME.fullmatch(name)]:
                raise ValueError(
                    f"feature names of letters, digits, _ and -, not `{odd[0]}` (`column` may be"
                    " any text)"
                )
        if not self.categorical:
            raise ValueError("at least one categorical feature")
        return self

    @model_validator(mode="after")
    def _targets(self) -> Self:
        if (self.label is None) != bool(self.labels):
            raise ValueError("either `label` or `labels`")
        if len(set(self.label_columns)) < len(self.labels):
            raise ValueError("each of `labels` once")
        if unknown := set(self.target) - set(self.label_columns):
            raise ValueError(
                f"as [target.NAME] one of {', '.join(self.label_columns)}, not {min(unknown)}"
            )
        if self.weight in self.label_columns or self.group in self.label_columns:
            raise ValueError("as `weight` and `group` columns that are no labels")
        if self.time is not None and self.time in (*self.label_columns, self.weight):
            raise ValueError("as `time` a column that is no label and no weight")
        return self

    @model_validator(mode="after")
    def _bytes_and_label(self) -> Self:
        """Refuse separators that are no plain ASCII byte, and features that read the label.

        Schemas of models that were trained before this was refused are taken.
        """
        if self.text_rules == 1:
            return self
        ordinary = "one ASCII character that is no quote and no end of a line"
        if not self.separator.isascii() or self.separator in _NO_SEPARATORS:
            raise ValueError(f"as `separator` {ordinary}, not {self.separator!r}")
        for feature in self.categorical:
            if not feature.multi_hot:
                continue
            if not feature.delimiter.isascii() or feature.delimiter in _NO_SEPARATORS:
                raise ValueError(
                    f"as `delimiter` of `{feature.name}` {ordinary}, not {feature.delimiter!r}"
                )
            if feature.delimiter == self.separator:
                raise ValueError(
                    f"a `delimiter` of `{feature.name}` that is not the `separator`"
                    f" {self.separator!r}"
                )
        readers = [(f.name, f.column) for f in self.dense]
        for f in self.categorical:
            columns = (f.column,) if f.events is None else f.events.columns(numeric=False)
            readers += [(f.name, column) for column in columns]
        for name, column in readers:
            if column in self.label_columns:
                raise ValueError(
                    f"features of other columns than the label `{column}`, which `{name}` would"
                    " give away"
                )
        return self

    @property
    def null_texts(self) -> tuple[bytes, ...]:
        """The texts of missing values as bytes."""
        return tuple(text.encode() for text in self.nulls)

    @property
    def _features(self) -> tuple[DenseFeature | CategoricalFeature, ...]:
        return (*self.dense, *self.categorical)

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Columns of the T labels, which are also the names of the tasks."""
        return self.labels if self.label is None else (self.label,)

    @property
    def targets(self) -> dict[str, Target]:
        """What each of the T labels holds."""
        return {column: self.target.get(column, _BINARY) for column in self.label_columns}

    @property
    def is_binary(self) -> bool:
        """Whether there is one label, of 0 or 1."""
        return [target.kind for target in self.targets.values()] == ["binary"]

    @property
    def has_plain_label(self) -> bool:
        """Whether there is one label, which stands there as 0 or 1."""
        return self.is_binary and not any(target.values for target in self.targets.values())

    @property
    def training_columns(self) -> tuple[str, ...]:
        """Columns that scoring needs not: labels, and what else no feature reads."""
        features = {feature.column for feature in self._features}
        about = (self.weight, self.group, self.time)
        others = [column for column in about if column not in features]
        return tuple(dict.fromkeys(c for c in (*self.label_columns, *others) if c is not None))

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Names of the n dense features."""
        return tuple(feature.name for feature in self.dense)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the F categorical features."""
        return tuple(feature.name for feature in self.categorical)

    def single_keys(self, raw: bool) -> tuple[str, ...]:
        """Names of the features that are not multi-hot and whose ids are raw, or are rows."""
        return tuple(f.name for f in self.categorical if not f.multi_hot and f.is_raw == raw)

    @property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """By table, in the order of their owners, the features that read it, its owner first."""
        owners = [feature.name for feature in self.categorical if feature.shares is None]
        sharing = [feature for feature in self.categorical if feature.shares is not None]
        return {
            owner: (owner, *(each.name for each in sharing if each.shares == owner))
            for owner in owners
        }

    @property
    def keys_by_table(self) -> tuple[str, ...]:
        """Names of the F categorical features in the order of :attr:`readers`, which is models'."""
        return tuple(name for names in self.readers.values() for name in names)

    @property
    def owners(self) -> tuple[CategoricalFeature, ...]:
        """The features that have a table of their own, in the order of :attr:`readers`."""
        return tuple(feature for feature in self.categorical if feature.shares is None)

    def used_columns(self, with_label: bool = True) -> tuple[str, ...]:
        """The columns that are read, each once, the labels first where they are."""
        features = [feature.column for feature in self._features]
        about = (*self.label_columns, self.weight, self.group, self.time)
        others = [column for column in about if column is not None]
        return tuple(dict.fromkeys([*(others if with_label else ()), *features]))

    def log_columns(self, with_label: bool = True) -> tuple[str, ...]:
        """The same of a log that is prepared, where sequences of events are not there yet."""
        built = {f.column: f.events for f in self.categorical if f.events is not None}
        columns = [name for name in self.used_columns(with_label) if name not in built]
        for events in built.values():
            columns += [*events.columns(numeric=False), *events.columns(numeric=True)]
        return tuple(dict.fromkeys(columns))

    def numeric_columns(self, with_label: bool = True) -> tuple[str, ...]:
        """The columns that are read as numbers, each once, the labels first where they are."""
        binned = [feature.column for feature in self.categorical if feature.binning is not None]
        dense = [feature.column for feature in self.dense]
        others = [column for column, target in self.targets.items() if not target.values]
        others += [column for column in (self.weight, self.time) if column is not None]
        return tuple(dict.fromkeys([*(others if with_label else ()), *dense, *binned]))

    def with_changes(
        self,
        min_count: int | None = None,
        hash_buckets: Mapping[str, int] | None = None,
        raw: bool = False,
    ) -> Schema:
        """A copy with changes.

        Args:
            min_count: another frequency cut for all vocabularies.
            hash_buckets: features to hash, into how many rows.
            raw: have raw ids in place of all vocabularies.

        Raises:
            ConfigError: when ``hash_buckets`` names no feature that has a table of its own.
        """
        hashed = dict(hash_buckets or {})
        if unknown := set(hashed) - self.readers.keys():
            raise ConfigError(
                f"no categorical feature `{min(unknown)}` to hash",
                f"one of {', '.join(self.readers)}",
                "correct the name",
            )

        def changed(feature: CategoricalFeature) -> CategoricalFeature:
            changes: dict[str, object] = {} if min_count is None else {"min_count": min_count}
            if raw and feature.has_vocabulary:
                changes |= {"encoding": "raw", "max_rows": None, "num_buckets": None}
            if feature.table in hashed:
                changes |= {
                    "encoding": "hash",
                    "num_buckets": hashed[feature.table],
                    "binning": None,
                }
            return _checked(
                CategoricalFeature, feature.model_dump() | changes, "the changed schema"
            )

        return self.model_copy(
            update={"categorical": tuple(changed(feature) for feature in self.categorical)}
        )

    def with_time(self, column: str | None, unit: str) -> Schema:
        """A copy in which events have their times in another column.

        Raises:
            ConfigError: for a column that is a label or a weight.
        """
        return _checked(Schema, self.model_dump() | {"time": column, "time_unit": unit}, "the time")

    def to_toml(self) -> str:
        """The schema as TOML text; :meth:`from_toml` reads it back."""
        tables = self.model_dump(exclude={"dense", "categorical"})
        tables["dense"] = {f.name: f.model_dump(exclude={"name"}) for f in self.dense}
        tables["categorical"] = {f.name: f.model_dump(exclude={"name"}) for f in self.categorical}
        return to_toml({key: value for key, value in tables.items() if value not in ({}, ())})

    @classmethod
    def of_manifest(cls, raw: dict[str, Any]) -> Schema:
        """A schema as a dataset or a checkpoint holds it.

        Raises:
            ValidationError: when it is none.
        """
        return cls.model_validate(_as_saved(raw))

    @classmethod
    def from_toml(cls, text: str, source: str = "the schema") -> Schema:
        """Read a schema.

        Raises:
            ConfigError: when the text is no TOML or no schema.
        """
        try:
            raw = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                f"{source}, which is no TOML: {error}", "a schema", "see docs/data.md"
            ) from error
        kinds = (("dense", DenseFeature), ("categorical", CategoricalFeature))
        features = {
            kind: list(_features(model, kind, raw.get(kind, {}), source)) for kind, model in kinds
        }
        return _checked(cls, raw | features, source)

    @classmethod
    def load(cls, path: Path) -> Schema:
        """Read a TOML file.

        Raises:
            ConfigError: when it cannot be read or is no schema.
        """
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"schema {path}: {error}", "a readable TOML file", "see docs/data.md"
            ) from error
        return cls.from_toml(text, str(path))


def _rise(numbers: Sequence[float]) -> bool:
    """Whether there are numbers, each finite and above the one before it."""
    pairs = pairwise(numbers)
    return bool(numbers) and all(map(isfinite, numbers)) and all(a < b for a, b in pairs)


def _sharing(feature: CategoricalFeature, owner: CategoricalFeature | None) -> CategoricalFeature:
    """A feature with all that the owner of its table says of it."""
    if owner is None:
        raise ValueError(
            f"as `shares` of `{feature.name}` a feature with a table of its own, not"
            f" `{feature.shares}`"
        )
    if owner.binning is not None and feature.multi_hot:
        raise ValueError(f"`{feature.name}` either binned or multi_hot, not both")
    of_table = {key: getattr(owner, key) for key in _OF_TABLE}
    for key in feature.model_fields_set & of_table.keys():
        if getattr(feature, key) != of_table[key]:
            raise ValueError(
                f"no `{key}` of its own for `{feature.name}`, which reads the table of"
                f" `{owner.name}`"
            )
    return CategoricalFeature.model_validate(feature.model_dump() | of_table)


def _as_saved(raw: object) -> object:
    """A schema that was written before it named its rules has the first."""
    return {"text_rules": 1} | raw if isinstance(raw, dict) else raw


SavedSchema = Annotated[Schema, BeforeValidator(_as_saved)]
"""The same as a field of a manifest."""


def _features(model: type[_S], kind: str, tables: object, source: str) -> Iterator[_S]:
    if not isinstance(tables, dict) or not all(
        isinstance(table, dict) for table in tables.values()
    ):
        raise ConfigError(
            f"`{kind}` in {source} that holds no tables",
            f"one table a feature, as [{kind}.NAME]",
            "see docs/data.md",
        )
    for name, table in tables.items():
        yield _checked(
            model, {"name": name, "column": name} | table, f"[{kind}.{name}] of {source}"
        )


def _checked(model: type[_S], raw: dict[str, Any], source: str) -> _S:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        fields = sorted(model.model_fields)
        if problem["type"] == "extra_forbidden":
            close = difflib.get_close_matches(key, fields, n=1)
            do = f"did you mean `{close[0]}`?" if close else "remove it"
            raise ConfigError(
                f"unknown key `{key}` in {source}", f"one of {', '.join(fields)}", do
            ) from error
        got = f"`{key} = {problem['input']!r}` in {source}" if key in raw else source
        where = f" for `{key}`" if key else ""
        raise ConfigError(
            got, problem["msg"].removeprefix("Value error, ") + where, "see docs/data.md"
        ) from error
