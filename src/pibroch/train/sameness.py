"""What ranks must have in common before they train one model: data, code, versions.

Shapes alone would hide the rest.
"""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path

from pibroch.collectives import Channel
from pibroch.config import RunConfig
from pibroch.data import EncodedDataset
from pibroch.errors import ConfigError
from pibroch.version import __version__

PACKAGE = Path(__file__).parents[1]
LIBRARIES = ("torch", "numba", "numpy")


def check_same_run(channel: Channel, config: RunConfig, dataset: EncodedDataset) -> None:
    """Compare what decides the numbers of a run over all ranks; every rank calls it.

    Blocks until all have.

    Raises:
        ConfigError: (on all ranks) names what differs, and on which rank.
    """
    if channel.ranks.world_size == 1:
        return
    here = {
        "data set": f"{dataset.digest[:12]} ({dataset.samples.get('train', 0):,} training samples)",
        "configuration": hashlib.sha256(
            config.model_dump_json(exclude={"data": {"dir"}}).encode()
        ).hexdigest()[:12],
        "Python": platform.python_version(),
        "pibroch": f"{__version__} ({code_digest()[:12]})",
        **{name: version(name) for name in LIBRARIES},
    }
    settings_by_rank: list[dict[str, str]] = channel.gather(here)
    for rank, others in enumerate(settings_by_rank):
        for name, first in settings_by_rank[0].items():
            if others[name] != first:
                raise ConfigError(
                    f"{name} {first} on rank 0 and {others[name]} on rank {rank}",
                    "the same on all ranks",
                    "copy the data set, or install the same versions, on all machines",
                )


@cache
def code_digest(package: Path = PACKAGE) -> str:
    """A hash over the package's sources."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()
