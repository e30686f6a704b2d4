"""Bounds on the rooms that every exchange comes in through (design note 0009): files, functions, constructors, types, names."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import pibroch

PACKAGE = Path(pibroch.__file__).parent
ROOMS = ("exchange", "collectives", "lookahead", "servers")
FILES = [path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))]
MOST_LINES_OF_FILE, MOST_LINES_OF_FUNCTION, MOST_PARAMETERS, MOST_ANY_PER_1000_LINES = 350, 60, 8, 8
IGNORES = {
    "assignment": "a method of torch's that has two names, each with overloads",
    "call-arg": "torch's stub of ProcessGroup knows one constructor of two",
    "override": "torch's stubs overload methods by names of arguments that it never uses",
    "arg-type": "torch's futures ask for a type variable, and dataclasses.fields for a dataclass",
    "attr-defined": "torch does not export it by name",
}
"""Kinds of mypy's errors that may be ignored, and why there is no other way."""


def each(kind, path):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kind)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_files_functions_and_constructors_are_small(path):
    assert path.read_text().count("\n") <= MOST_LINES_OF_FILE
    for function in each(ast.FunctionDef, path):
        assert function.end_lineno - function.lineno < MOST_LINES_OF_FUNCTION, function.name
        if function.name == "__init__":
            arguments = function.args
            own = len(arguments.args) - 1 + len(arguments.kwonlyargs)
            assert own <= MOST_PARAMETERS, f"{own} parameters of a constructor at line {function.lineno}"


def test_types_are_said():
    text = "".join(path.read_text() for path in FILES)
    used = sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(_without_future(text))))
    assert used <= text.count("\n") * MOST_ANY_PER_1000_LINES / 1000
    kinds = re.findall(r"# type: ignore(.*)", text)
    assert all(kind.startswith("[") and kind[1 : kind.index("]")] in IGNORES for kind in kinds), kinds


def _without_future(text):
    return text.replace("from __future__ import annotations\n", "")


def test_no_class_name_twice():
    names = Counter(node.name for path in FILES for node in each(ast.ClassDef, path))
    everywhere = Counter(node.name for path in PACKAGE.rglob("*.py") for node in each(ast.ClassDef, path))
    assert not [name for name in names if everywhere[name] > 1]


def test_words_of_a_private_dialect_do_not_come_back():
    """Words that a stranger had to ask about, see style: names."""
    dialect = re.compile(r"\b(courier|clerk|errand|parcel|holdings|lifeline|said|told)s?\b", re.IGNORECASE)
    for path in FILES:
        names = {node.id for node in each(ast.Name, path)} | {node.name for node in each(ast.ClassDef, path)}
        names |= {node.name for node in each(ast.FunctionDef, path)} | {node.attr for node in each(ast.Attribute, path)}
        assert not [name for name in names if dialect.search(name.replace("_", " "))], path
