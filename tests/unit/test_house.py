"""The house: types, words, circles of imports and READMEs of rooms (design note 0009)."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import pibroch
import tiers

PACKAGE = Path(pibroch.__file__).parent
ROOT = Path(__file__).parents[2]
ROOMS = ("exchange", "collectives", "servers")
FILES = [path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))]
EVERY_FILE = sorted(PACKAGE.rglob("*.py"))
MOST_ANY_PER_1000_LINES = 10
MOST_ANY_PER_1000_LINES_OF_ROOMS = 8
IGNORES = {
    "assignment": "a method of torch's that has two names, each with overloads",
    "call-arg": "torch's stub of ProcessGroup knows one constructor of two",
    "override": "torch's stubs overload methods by names of arguments that it never uses",
    "arg-type": "torch's futures ask for a type variable, and dataclasses.fields for a dataclass",
    "attr-defined": "torch does not export it by name",
}
"""Kinds of mypy's errors that may be ignored, and why there is no other way."""


@cache
def parsed(path):
    return ast.parse(path.read_text())


def each(kind, path):
    return [node for node in ast.walk(parsed(path)) if isinstance(node, kind)]


def times_any(path):
    """How often a file says ``Any``: as a name, comments, strings and imports left out."""
    lines = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            lines[token.start[0]].append(token.string)
    return sum(names.count("Any") for names in lines.values() if names[0] not in ("from", "import"))


def test_any_is_for_boundaries():
    lines = sum(path.read_text().count("\n") for path in EVERY_FILE)
    assert sum(times_any(path) for path in EVERY_FILE) <= lines * MOST_ANY_PER_1000_LINES / 1000


def test_types_are_said():
    text = "".join(path.read_text() for path in FILES)
    assert (
        sum(times_any(path) for path in FILES)
        <= text.count("\n") * MOST_ANY_PER_1000_LINES_OF_ROOMS / 1000
    )
    kinds = re.findall(r"# type: ignore(.*)", text)
    assert all(kind.startswith("[") and kind[1 : kind.index("]")] in IGNORES for kind in kinds), (
        kinds
    )


def packs_unrelated_values(node):
    """Whether ``a, b = x, y`` could as well be two lines: no value reads what stands left of it.

    >>> packs_unrelated_values(ast.parse("a, b = 1, 2").body[0])
    True
    >>> packs_unrelated_values(ast.parse("a, b = b, a").body[0])
    False
    """
    target = node.targets[0]
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    names = [ast.unparse(name) for name in target.elts]
    values = [ast.unparse(value) for value in node.value.elts]
    return not any(
        re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", value)
        for place, name in enumerate(names)
        for value in values[place + 1 :]
    )


def test_an_assignment_packs_no_unrelated_values():
    assert not [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in EVERY_FILE
        for node in each(ast.Assign, path)
        if packs_unrelated_values(node)
    ]


def test_words_of_a_private_dialect_do_not_come_back():
    """Words that a stranger had to ask about, see style: names."""
    dialect = re.compile(
        r"\b(courier|clerk|errand|parcel|holdings|lifeline|said|told)s?\b", re.IGNORECASE
    )
    for path in FILES:
        names = {node.id for node in each(ast.Name, path)} | {
            node.name for node in each(ast.ClassDef, path)
        }
        names |= {node.name for node in each(ast.FunctionDef, path)} | {
            node.attr for node in each(ast.Attribute, path)
        }
        assert not [name for name in names if dialect.search(name.replace("_", " "))], path


BROAD = {"Exception", "BaseException"}


def is_broad(kind):
    """Whether an ``except`` or a ``suppress`` of this kind takes every error."""
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(each is None or ast.unparse(each).rpartition(".")[2] in BROAD for each in kinds)


def swallows(node):
    """Whether a statement takes every error and does not raise, log or use it."""
    if isinstance(node, ast.Call):
        is_suppress = ast.unparse(node.func).rpartition(".")[2] == "suppress"
        return is_suppress and any(map(is_broad, node.args))
    if not isinstance(node, ast.ExceptHandler) or not is_broad(node.type):
        return False
    inner = [each for statement in node.body for each in ast.walk(statement)]
    return not any(
        isinstance(each, ast.Raise)
        or (isinstance(each, ast.Name) and each.id == node.name)
        or (isinstance(each, ast.Attribute) and each.attr == "exception")
        or (isinstance(each, ast.keyword) and each.arg == "exc_info")
        for each in inner
    )


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("except Exception: pass", True),
        ("except (KeyError, BaseException): pass", True),
        ("except: f()", True),
        ("except Exception as error: f()", True),
        ("except OSError: pass", False),
        ("except Exception as error: tell(error)", False),
        ("except Exception: log.exception('failed')", False),
        ("except Exception: log.debug('failed', exc_info=True)", False),
        ("except: raise", False),
        ("finally: f(suppress(Exception))", True),
        ("finally: f(contextlib.suppress(OSError, Exception))", True),
        ("finally: f(suppress(OSError))", False),
    ],
)
def test_what_takes_every_error(text, verdict):
    assert any(map(swallows, ast.walk(ast.parse(f"try: f()\n{text}")))) == verdict


def test_what_takes_every_error_and_says_nothing_has_its_reason_on_its_line():
    """As ruff's BLE and S110, but an error that is handed on is taken as said."""
    assert not [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in EVERY_FILE
        for node in each((ast.Call, ast.ExceptHandler), path)
        if swallows(node) and "  # " not in path.read_text().splitlines()[node.lineno - 1]
    ]


MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if path != PACKAGE / "__init__.py"
}


def modules_named(name, at_load):
    """Modules that a file imports when it is loaded, or anywhere and for any reason."""
    left = list(parsed(MODULES[name]).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("pibroch.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            room = node.module.removeprefix("pibroch.")
            inner = [f"{room}.{alias.name}" for alias in node.names]
            yield from (each if each in MODULES else room for each in inner)
        elif not (at_load and (isinstance(node, ast.FunctionDef) or is_for_types(node))):
            left.extend(ast.iter_child_nodes(node))


def is_for_types(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def circles(at_load):
    """Modules that import each other, by whatever way around."""
    named = {
        name: {each for each in modules_named(name, at_load) if each in MODULES} for name in MODULES
    }
    reached = {name: reach(name, named) for name in named}
    together = defaultdict(set)
    for name in named:
        alike = frozenset(each for each in reached[name] if name in reached[each])
        if alike:
            together[alike | {name}].add(name)
    return {tuple(sorted(each)) for each in together if len(each) > 1}


def reach(name, named):
    seen = set()
    left = [name]
    while left:
        fresh = named[left.pop()] - seen
        seen |= fresh
        left.extend(fresh)
    return seen


def test_no_file_needs_itself_to_be_loaded():
    assert not circles(at_load=True)


def test_no_files_name_each_other():
    """Not inside functions nor for types alone either."""
    assert not circles(at_load=False)


def test_a_room_has_a_readme_of_one_screen_that_names_its_files():
    files = {
        path.name
        for folder in (PACKAGE, Path(__file__).parents[1])
        for path in folder.rglob("*.py")
    }
    problems = []
    for room in sorted(path.parent for path in PACKAGE.glob("*/__init__.py")):
        text = (room / "README.md").read_text()
        if not text.startswith("# ") or text.count("\n") > 60:
            problems.append(f"{room.name}: no title, or more than 60 lines")
        named = set(re.findall(r"`(?:\w+/)*(\w+\.py)`", text))
        problems += [f"{room.name} names {name}, which is not there" for name in named - files]
        links = re.findall(r"\]\((\.[^)#]*)", text)
        problems += [
            f"{room.name} links to {link}, which is not there"
            for link in links
            if not (room / link).exists()
        ]
    assert not problems


def test_tiers_name_tests_that_are_there():
    gone = []
    for begin in filter(None, (*tiers.TIERS, *tiers.SOAK)):
        path, _, test = begin.partition("::")
        if not (ROOT / path).exists() or (test and f"def {test}" not in (ROOT / path).read_text()):
            gone.append(begin)
    assert not gone


def test_pages_have_lines_of_at_most_100_characters():
    """Tables and links excepted, and what `pibroch bench` writes; ruff looks at Python."""
    pages = list(ROOT.glob("*.md"))
    pages += (ROOT / "benchmarks").glob("*.md")
    for folder in ("docs", "src", "tests", "tools", "benchmarks/lab"):
        pages += (ROOT / folder).rglob("*.md")
    assert not [
        f"{page.relative_to(ROOT)}:{number}"
        for page in pages
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > 100 and not line.startswith(("|", "[")) and "](" not in line
    ]
