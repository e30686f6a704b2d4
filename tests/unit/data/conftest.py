import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.presets import criteo_schema
from pibroch.data.sources import TextSource

ROOT = Path(__file__).parents[3]


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """Path of a file of real data; skips the test where it is absent."""

    def find(name: str) -> Path:
        path = Path(os.environ.get("PIBROCH_TEST_DATA", ROOT.parent / "shared" / "data")) / name
        if not path.exists():
            pytest.skip(f"no {path}: real data are for local use only")
        return path

    return find


def criteo_line(random: random.Random, missing: float = 0.2) -> str:
    """One record in Criteo's format: small integers, skewed categories, some of both missing."""
    integers = [
        "" if random.random() < missing else str(int(random.expovariate(0.05)) - 1)
        for _ in range(13)
    ]
    categories = [
        ""
        if random.random() < missing
        else f"{int(random.paretovariate(0.7)) % 1000 * 977 + i:08x}"
        for i in range(26)
    ]
    return "\t".join([str(int(random.random() < 0.25)), *integers, *categories])


@pytest.fixture(scope="session")
def criteo_lines() -> list[str]:
    generator = random.Random(7)
    return [criteo_line(generator) for _ in range(2000)]


@pytest.fixture
def criteo_file(tmp_path: Path, criteo_lines: list[str]) -> Path:
    path = tmp_path / "criteo.tsv"
    path.write_text("\n".join(criteo_lines) + "\n")
    return path


@pytest.fixture
def prepare_criteo(tmp_path: Path):
    """Prepare a file in Criteo's format, with small pieces."""

    def run(path: Path, out: Path | None = None, schema=None, **options):
        schema = schema or criteo_schema()
        source = TextSource(path, schema.separator, schema.quotes, schema.columns)
        options.setdefault("piece_bytes", 50_000)
        return prepare([source], schema, out or tmp_path / "dataset", PrepareOptions(**options))

    return run
