"""Whether this checkout could be released.

Version, changelog, wheel, and the wheel in an environment of its own.

``make release-check``; by default the new environment takes dependencies from this one,
``--with-dependencies`` installs them.
"""

from __future__ import annotations

import argparse
import os
import re
import site
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
HEADING = re.compile(r"^## (?:(Unreleased)|(\S+) \((\d{4}-\d{2}-\d{2})\))$", re.MULTILINE)
NEEDED = (
    "pibroch/__init__.py",
    "pibroch/py.typed",
    "pibroch/recipes/synthetic_small.toml",
    "pibroch/cli/main.py",
)
PROBE = """
import sys, importlib.metadata, pibroch
from pibroch.config import load_recipe
assert pibroch.__file__.startswith(sys.prefix), pibroch.__file__
version = pibroch.__version__
assert importlib.metadata.version("pibroch") == version == sys.argv[1], version
import torch, pibroch as pb
load_recipe("synthetic_small")
embeddings = pb.Embeddings([pb.Table("item", 5, 4)], pb.SGD(lr=0.1))
ids = torch.tensor([[0, 3]])
batch = pb.JaggedBatch.from_one_hot(torch.zeros(2, 0), ["item"], ids, torch.zeros(2))
embeddings(batch).sum().backward()
"""


def version_of(root: Path) -> str:
    """What ``version.py`` says.

    Raises:
        ValueError: when that is no version.
    """
    match = re.search(
        r'^__version__ = "(.*)"$', (root / "src/pibroch/version.py").read_text(), re.MULTILINE
    )
    if match is None or not VERSION.fullmatch(match[1]):
        raise ValueError(
            f"version.py has {match[1] if match else 'no version'}; need one such as 1.2.3 or"
            " 1.2.3rc1"
        )
    return match[1]


def check_changelog(text: str, version: str) -> str:
    """The newest heading: this version with its date, or ``Unreleased``.

    Something must stand below it.

    Raises:
        ValueError: when it is not so.
    """
    headings = list(HEADING.finditer(text))
    if not headings:
        raise ValueError(
            "CHANGELOG.md has no heading; need `## Unreleased` or `## 1.2.3 (2026-01-31)`"
        )
    newest = headings[0]
    others = [heading[2] for heading in headings[1:]]
    below = text[newest.end() : headings[1].start() if others else len(text)]
    if not re.search(r"^- ", below, re.MULTILINE):
        raise ValueError(f"CHANGELOG.md has nothing below `{newest[0]}`; need what changed")
    if newest[2] not in (None, version):
        raise ValueError(
            f"CHANGELOG.md begins with {newest[2]}, version.py has {version}; need the same"
        )
    if version in others:
        raise ValueError(
            f"version {version} is released already, says CHANGELOG.md; raise it in version.py"
        )
    return newest[0].removeprefix("## ")


def build_wheel(out: Path, version: str) -> Path:
    """Build it and look into it.

    Raises:
        ValueError: when something is missing, or too much.
    """
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        out,
        ROOT,
    )
    (wheel,) = out.glob("*.whl")
    if not wheel.name.startswith(f"pibroch-{version}-py3-none-any"):
        raise ValueError(
            f"the wheel is {wheel.name}; need version {version}, for every Python 3 and system"
        )
    names = zipfile.ZipFile(wheel).namelist()
    if missing := [name for name in NEEDED if name not in names]:
        raise ValueError(
            f"{wheel.name} lacks {', '.join(missing)}; see [tool.hatch.build] in pyproject.toml"
        )
    if strange := [name for name in names if not name.startswith(("pibroch/", "pibroch-"))]:
        raise ValueError(f"{wheel.name} has {strange[0]}; need the package alone")
    return wheel


def try_wheel(wheel: Path, folder: Path, version: str, with_dependencies: bool) -> None:
    """Install the wheel into a new environment and try it there.

    Import it, train a step and ask the command for its version.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    options = [] if with_dependencies else ["--no-deps"]
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *options, wheel)
    if not with_dependencies:
        (place,) = folder.glob("lib/python*/site-packages")
        (place / "dependencies.pth").write_text("\n".join(dependencies()))
    run(python, "-I", "-c", PROBE, version, cwd=folder)
    output = run(folder / "bin" / "pibroch", "--version", cwd=folder)
    assert output == f"pibroch {version}\n", output


def dependencies() -> list[str]:
    """Folders with the packages of this environment.

    Those that its ``.pth`` files name have no place in the new one.
    """
    places = [
        Path(place)
        for place in (*site.getsitepackages(), *sys.path)
        if place.endswith("site-packages")
    ]
    return [str(place) for place in dict.fromkeys(places)]


def run(*command: object, cwd: Path | None = None) -> str:
    """What a program says; an error with it when it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = tuple(map(str, command))
    ran = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, timeout=1800, env=environment
    )
    if ran.returncode:
        raise ValueError(
            f"{' '.join(map(str, command))[:200]}: {ran.stderr.strip() or ran.stdout.strip()}"
        )
    return ran.stdout


def main() -> None:
    """Check all, one line each; exit with 1 at the first that does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--with-dependencies", action="store_true", help="install dependencies too (a gigabyte)"
    )
    wanted = parser.parse_args()
    try:
        version = version_of(ROOT)
        heading = check_changelog((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
        print(f"version {version}; changelog: {heading}")
        with tempfile.TemporaryDirectory() as folder:
            wheel = build_wheel(Path(folder), version)
            print(f"wheel {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB")
            try_wheel(wheel, Path(folder) / "environment", version, wanted.with_dependencies)
            print("installs, imports, trains a step and answers in an environment of its own")
    except ValueError as error:
        sys.exit(f"not fit for release: {error}")


if __name__ == "__main__":
    main()
