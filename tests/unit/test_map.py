"""ARCHITECTURE.md: its picture is drawn from the source, and the files that it names are there."""

import re
from importlib.util import module_from_spec, spec_from_file_location

from doc_pages import ROOT

PAGE = (ROOT / "ARCHITECTURE.md").read_text()


def map_of_the_house():
    spec = spec_from_file_location("map_of_the_house", ROOT / "tools" / "map.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_what_the_imports_say():
    tool = map_of_the_house()
    assert tool.FIGURE.read_text() == tool.draw(), "run: python tools/map.py"


def test_a_room_stands_above_those_that_it_imports():
    edges = {"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"e"}, "e": {"d", "c"}}
    tool = map_of_the_house()
    assert tool.levels(edges) == {"a": 2, "b": 1, "c": 0, "d": 1, "e": 1}
    assert tool.arrows(edges) == [("a", "b"), ("b", "c"), ("d", "e"), ("e", "c"), ("e", "d")]


def test_what_the_page_names_is_there():
    package = ROOT / "src" / "pibroch"
    for path in re.findall(r"`([\w/]+(?:\.py|/))`", PAGE):
        assert any(package.rglob(path)) or (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / path).exists(), path


def test_every_room_is_in_the_table():
    named = set(re.findall(r"`(\w+)`", PAGE.partition("| room |")[2].partition("\n\n")[0]))
    assert {room for room in map_of_the_house().rooms() if "." not in room} <= named
