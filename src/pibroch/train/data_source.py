"""From the ``[data]`` table of a recipe to an encoded dataset.

Open it, or generate it once and keep it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from pibroch.config.data import DataConfig, SynthesizeConfig
from pibroch.data import EncodedDataset
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.data.writer import FORMAT_VERSION
from pibroch.errors import DataError, StorageError
from pibroch.version import __version__

logger = logging.getLogger(__name__)


def open_dataset(config: DataConfig) -> EncodedDataset:
    """The dataset that a recipe names.

    Raises:
        DataError: when it is missing or damaged; says how to make it when the recipe does.
        StorageError: when generated data find no room.
    """
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


def _generated(config: SynthesizeConfig) -> EncodedDataset:
    """Generated data from the cache, made when absent; several processes may ask at once."""
    options = SyntheticOptions(
        num_samples=config.rows,
        seed=config.seed,
        max_table_rows=config.max_table_rows,
        multi_hot=config.multi_hot,
        history=config.history,
        raw=config.raw,
    )
    identity = json.dumps(
        [asdict(options), FORMAT_VERSION, __version__], sort_keys=True, default=str
    )
    folder = cache_folder() / f"synthetic-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not folder.exists():
        logger.info("generating %s samples into %s", f"{config.rows:,}", folder)
        partial_folder = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            synthesize(options, partial_folder, overwrite=True)
            partial_folder.rename(folder)
        except OSError as error:
            shutil.rmtree(partial_folder, ignore_errors=True)
            if not folder.exists():  # else another process was faster, and its data are the same
                do = "free some space, or set PIBROCH_CACHE to another folder"
                raise StorageError(
                    f"{error.strerror} while generating {folder}", "a folder with room", do
                ) from error
    return EncodedDataset.open(folder)
