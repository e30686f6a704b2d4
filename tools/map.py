"""The map of the house: rooms and who imports whom, drawn from the source.

``python tools/map.py`` writes ``docs/figures/rooms.svg``; a test compares it with the source.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pibroch"
FIGURE = ROOT / "docs" / "figures" / "rooms.svg"
INNER = ("exchange.lookahead.oracle", "observability.exposition")
"""Rooms inside others that stand elsewhere.

The oracle stands lower, as servers use it too; figures over HTTP higher, as they use `serve`.
"""

WIDTH = 880
ROW_HEIGHT = 74
BOX_HEIGHT = 34


def rooms() -> list[str]:
    """Every package, the rooms inside others, and ``errors``."""
    packages = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    return sorted([*packages, *INNER, "errors"])


def room_of(module: str, names: list[str]) -> str | None:
    """The room of a module that is named without ``pibroch``; of two the inner one."""
    parts = module.split(".")
    candidates = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in candidates if name in names), None)


def imported(path: Path) -> set[str]:
    """Modules of pibroch that a file names in an import, anywhere, without ``pibroch``."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("pibroch.") for name in modules if name.startswith("pibroch.")}


def imports() -> dict[str, set[str]]:
    """Of each room those that its files import."""
    names = rooms()
    edges: dict[str, set[str]] = {name: set() for name in names}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        room = room_of(module.removesuffix(".__init__"), names)
        if room is not None:
            edges[room] |= {room_of(other, names) for other in imported(path)} - {None, room}
    return edges


def below(room: str, edges: dict[str, set[str]]) -> set[str]:
    """All rooms that a room needs, at any distance."""
    seen: set[str] = set()
    left = [room]
    while left:
        fresh = edges[left.pop()] - seen
        seen |= fresh
        left.extend(fresh)
    return seen


def levels(edges: dict[str, set[str]]) -> dict[str, int]:
    """How high each room stands: one above the highest that it needs.

    Rooms that need each other stand on one level.
    """
    needs = {room: below(room, edges) for room in edges}
    result: dict[str, int] = {}
    for room in sorted(edges, key=lambda each: (len(needs[each] - {each}), each)):
        lower = [other for other in needs[room] if room not in needs[other]]
        result[room] = 1 + max((result[other] for other in lower), default=-1)
    return result


def arrows(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports that no chain of others implies."""
    result = []
    for room, others in edges.items():
        for other in others:
            between = (each for each in others - {other} if other in below(each, edges))
            if all(room in below(each, edges) or each in below(other, edges) for each in between):
                result.append((room, other))
    return sorted(result)


def places(heights: dict[str, int]) -> dict[str, tuple[float, float, float]]:
    """Centre and width of each room's box: x, y, width."""
    top = max(heights.values())
    result = {}
    for level in range(top + 1):
        names = sorted(name for name in heights if heights[name] == level)
        widths = [max(84, 8.2 * len(title(name)) + 18) for name in names]
        gap = (WIDTH - sum(widths)) / (len(names) + 1)
        x = gap
        for name, width in zip(names, widths, strict=True):
            result[name] = (x + width / 2, 30 + (top - level) * ROW_HEIGHT, width)
            x += width + gap
    return result


def title(room: str) -> str:
    """What stands in a room's box."""
    return room.replace(".", "/")


def draw() -> str:
    """The figure, as SVG: who stands higher imports whom an arrow leads to."""
    edges = imports()
    spots = places(levels(edges))
    height = max(y for _, y, _ in spots.values()) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}"'
        f' width="{WIDTH}" height="{height:.0f}" font-family="sans-serif" font-size="13">',
        '<defs><marker id="head" markerWidth="7" markerHeight="7" refX="6" refY="3.5"'
        ' orient="auto"><path d="M0 0 L7 3.5 L0 7 z" fill="#78909c"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
    ]
    for room, other in arrows(edges):
        x, y, _ = spots[room]
        to_x, to_y, _ = spots[other]
        start = y + BOX_HEIGHT / 2
        end = to_y - BOX_HEIGHT / 2 - 1 if to_y > y else to_y + BOX_HEIGHT / 2 + 1
        bend = 22 if to_y > y else -16
        lines.append(
            f'<path d="M{x:.0f} {start:.0f} C{x:.0f} {start + abs(bend):.0f}'
            f' {to_x:.0f} {end - bend:.0f} {to_x:.0f} {end:.0f}"'
            ' fill="none" stroke="#b0bec5" marker-end="url(#head)"/>'
        )
    for room, (x, y, width) in spots.items():
        lines.append(
            f'<rect x="{x - width / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{width:.0f}"'
            f' height="{BOX_HEIGHT}" rx="5" fill="#e8f0f4" stroke="#455a64"/>'
        )
        lines.append(f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle">{title(room)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_text(draw())
