"""Imports point one way (design, section 3); pure cores touch no clock, thread, socket or process group."""

import ast
from pathlib import Path

import pytest

import pibroch

PACKAGE = Path(pibroch.__file__).parent
LAYERS = [
    {"errors", "version", "process", "ports", "host", "config"},
    {"data", "kernels", "observability"},
    {"embedding", "models"},
    {"planner", "lookahead", "rpc", "collectives"},
    {"roles"},
    {"servers", "processors"},
    {"exchange"},
    {"train", "serve", "sim"},
    {"cli", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def rooms_imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "pibroch" and len(parts) > 1 and parts[1] in LEVEL:
                yield parts[1], node.lineno


def test_every_room_has_its_place():
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert rooms <= set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_down(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for other, line in rooms_imported(path):
        assert LEVEL[other] <= LEVEL[room], f"{path}:{line}: {room} imports {other}, which stands above it"
