"""From the ``[data]`` table of a recipe to an encoded dataset.

Open it, or generate it once and keep it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from pibroch.config.data import DataConfig, StreamConfig, SynthesizeConfig
from pibroch.data import EncodedDataset, Schema
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.data.writer import FORMAT_VERSION, DatasetWriter
from pibroch.errors import ConfigError, DataError, StorageError
from pibroch.version import __version__

logger = logging.getLogger(__name__)


def open_dataset(config: DataConfig) -> EncodedDataset:
    """The dataset that a recipe names.

    Raises:
        DataError: when it is missing or damaged; says how to make it when the recipe does.
        StorageError: when generated data find no room.
    """
    if config.stream is not None and config.stream.schema_file is not None:
        return _without_samples(config.stream, Path(config.stream.schema_file))
    if config.dir is not None:
        if not Path(config.dir).exists():
            how = f"run `{config.prepare}`, or " if config.prepare else ""
            raise DataError(
                f"no dataset at {config.dir}",
                "a folder made by `pibroch data prepare` or `pibroch data synthesize`",
                f"{how}pass --data DIR",
            )
        dataset = EncodedDataset.open(config.dir)
        if not dataset.has_labels:
            raise DataError(
                f"{config.dir}, which has no labels", "labels, to train", "pass --data DIR"
            )
        return dataset
    assert config.synthesize is not None, "the configuration was checked"
    return _generated(config.synthesize)


def cache_folder() -> Path:
    """Where generated data are kept: ``$PIBROCH_CACHE``, else the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PIBROCH_CACHE") or Path(home) / "pibroch")


def stream_schema(schema: Schema, config: StreamConfig) -> Schema:
    """A schema with what a recipe says of events' times."""
    unit = config.time_unit or schema.time_unit
    return schema.with_time(config.time or schema.time, unit)


def _without_samples(config: StreamConfig, path: Path) -> EncodedDataset:
    """What a stream's records are, as a data set that has none yet.

    Raises:
        ConfigError: for a schema with a vocabulary, which nobody has counted.
    """
    schema = stream_schema(Schema.load(path), config)
    if counted := [feature.name for feature in schema.categorical if feature.has_vocabulary]:
        raise ConfigError(
            f"`{counted[0]}` with a vocabulary in {path}, the schema of a stream",
            "encodings that need no count: raw, hash, integer or a binning",
            'write encoding = "raw", or train with `data.dir`, whose vocabularies stay as they are',
        )

    def make(folder: Path) -> None:
        num_rows = {feature.name: feature.fixed_num_rows for feature in schema.owners}
        DatasetWriter(folder, schema).finish(num_rows, {"schema": str(path)})

    return _cached("stream", [schema.model_dump(mode="json"), str(path)], make)


def _generated(config: SynthesizeConfig) -> EncodedDataset:
    """Generated data from the cache, made when absent."""
    options = SyntheticOptions(
        num_samples=config.rows,
        seed=config.seed,
        max_table_rows=config.max_table_rows,
        multi_hot=config.multi_hot,
        history=config.history,
        raw=config.raw,
    )

    def make(folder: Path) -> None:
        logger.info("generating %s samples into %s", f"{config.rows:,}", folder.with_suffix(""))
        synthesize(options, folder, overwrite=True)

    return _cached("synthetic", asdict(options), make)


def _cached(kind: str, about: object, make: Callable[[Path], None]) -> EncodedDataset:
    """A dataset from the cache, made when absent; several processes may ask at once."""
    identity = json.dumps([about, FORMAT_VERSION, __version__], sort_keys=True, default=str)
    folder = cache_folder() / f"{kind}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not folder.exists():
        partial_folder = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            make(partial_folder)
            partial_folder.rename(folder)
        except OSError as error:
            shutil.rmtree(partial_folder, ignore_errors=True)
            if not folder.exists():  # else another process was faster, and its data are the same
                do = "free some space, or set PIBROCH_CACHE to another folder"
                raise StorageError(
                    f"{error.strerror} while making {folder}", "a folder with room", do
                ) from error
    return EncodedDataset.open(folder)
