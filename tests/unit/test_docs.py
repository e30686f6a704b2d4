"""The guides: every block is checked or run, and the site builds without a warning."""

import re
import shlex
import subprocess
import tomllib
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location

import pytest
from benchmarks.figures import COMMENT

import doc_pages
from doc_pages import BLOCKS, GUIDES, NOTES, PYTHON, ROOT
from forked import Program
from pibroch.config import load_recipe
from pibroch.data import Schema
from pibroch.planner.topology import ClusterTopology
from pibroch.train.search import Search, read_space

EXCERPTS = {
    "docs/extending.md": "own_exchange.py",
    "docs/extending/optimizer.md": "own_optimizer.py",
    "docs/extending/row-index.md": "own_row_index.py",
    "docs/extending/data-source.md": "own_data_source.py",
    "docs/extending/role.md": "own_role.py",
    "docs/extending/transport.md": "own_transport.py",
    "docs/my-model.md": "own_model.py",
}
"""Pages whose Python is an example's, which a test runs: word for word."""
LANGUAGES = {"python", "console", "toml", "json", "text", "dockerfile"}
CODE = (
    "import ",
    "from pibroch",
    "pibroch ",
    "torchrun ",
    "$ ",
    "def ",
    "class ",
    "[embedding",
    "{",
)
PIP_INSTALL = re.compile(
    r"pip install(?:[ \t]+|\n)((?:'[^']+'|[^\s`'\"&|;#,]+)(?:[ \t]+(?:'[^']+'|[^\s`'\"&|;#,]+))*)"
)
"""The words behind it, on a page or in a message."""
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?(?:[<>=!~].*)?")
NO_CODE = {"docs/rpc.md": "from torch.distributed import rpc   "}
"""Of `text` that looks like code, and is a table of it."""


def check_each(language, check):
    """All blocks in a language; those that fail are named together."""
    problems = []
    for block in BLOCKS:
        if block.language == language:
            try:
                check(block)
            except Exception as error:
                problems.append(f"{block}: {type(error).__name__}: {error}")
    assert not problems, "\n".join(problems)


def test_every_block_says_what_it_is_in():
    """So that none escapes what is below.

    A block in another language, or code that is called text, is refused.
    """
    for block in BLOCKS:
        if "design" in block.page:
            assert block.language in LANGUAGES | {"{toctree}"}, block
            continue
        assert block.language in LANGUAGES or block.language.startswith("{"), block
        if block.language == "text" and block.page not in NO_CODE:
            assert not [line for line in block.text.splitlines() if line.startswith(CODE)], block


def test_pages_with_an_example_have_its_words():
    sources = {page: (ROOT / "examples" / name).read_text() for page, name in EXCERPTS.items()}
    assert all(PYTHON[page] for page in EXCERPTS)
    changed = [
        f"{block} is not in {EXCERPTS[page]}"
        for page, source in sources.items()
        for block in PYTHON[page]
        if block.text.rstrip() not in source
    ]
    assert not changed


@pytest.mark.parametrize("page", sorted(PYTHON.keys() - EXCERPTS.keys()))
def test_python_of_a_page_runs(page, tmp_path):
    doc_pages.run_page(page, "doc_stand_ins", tmp_path)


def test_toml_is_a_recipe_or_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")  # what recipes of one's own name

    def check(block):
        parsed = tomllib.loads(block.text)
        path = tmp_path / "here.toml"
        path.write_text(block.text)
        if "project" in parsed:
            return
        if {"label", "labels"} & parsed.keys():
            Schema.load(path)
            return
        if "low = " in block.text:
            Search("synthetic_small", (), read_space(path), 1, tmp_path / "search")
            return
        if "hosts" in parsed:
            assert ClusterTopology.load(path).num_ranks == 8
            return
        if "extends" not in parsed:
            path.write_text('extends = "synthetic_small"\n' + block.text)
        load_recipe(str(path), [])

    check_each("toml", check)


def test_commands_are_there_and_take_what_they_are_given(tmp_path, monkeypatch):
    """By the command line's own parser, and recipes with what is set in them.

    Nothing is started.
    """
    monkeypatch.chdir(tmp_path)
    # as if `pibroch plan towers` had run before
    (tmp_path / "groups.json").write_text('{"towers": [["C1"], ["C2"]]}')

    def check(block):
        lines = block.text.replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]  # the rest is output
        for line in lines:
            for words in programs(line):
                check_program(words)

    check_each("console", check)


def programs(line):
    """The programs of a line, piped or not.

    What is optional is given, placeholders stand for themselves.
    """
    words = shlex.split(line, comments=True)
    programs = [[]]
    for word in words:
        if word == "|":
            programs.append([])
        elif word in (">", "&"):
            break
        elif word.strip("[].…") and (programs[-1] or not (word.isupper() and "=" in word)):
            bare = word.removesuffix("...").strip("[]").replace("…", "x")
            programs[-1].append(bare.partition("|")[0])
    return [program for program in programs if program]


def check_program(words):
    program, *rest = [word for word in words if not word.startswith(("PYTHONPATH=", "WORLD_SIZE="))]
    if program == "pibroch":
        check_command(rest[2:] if rest[:1] == ["--import"] else rest)
    elif program == "torchrun":
        if "-m" in rest:
            check_command(rest[rest.index("-m") + 2 :])
        else:
            assert (ROOT / next(word for word in rest if word.endswith(".py"))).is_file()
    elif program == "make":
        assert f"\n{rest[0]}:" in (ROOT / "Makefile").read_text()
    elif program == "python" and rest[0] == "-m":
        assert rest[1] == "pip" or find_spec(rest[1]) or (ROOT / rest[1].replace(".", "/")).is_dir()
    elif program in ("python", "pytest") or "/" in program:
        assert (ROOT / (program if "/" in program else rest[0])).exists(), words
    else:
        assert program in {"export", "pip", "zcat", "tail", "curl", "jq", "kubectl", "openssl"}, (
            f"an unknown program: {words}"
        )


def check_command(words):
    by_path = {tuple(name.split()[1:]): command for name, command, _ in commands()}
    if words[0] == "simulate" and tuple(words[:2]) not in by_path:  # its own name stands for it
        words = ["simulate", "recipe", *words[1:]]
    path = max((path for path in by_path if tuple(words[: len(path)]) == path), key=len)
    arguments = [
        "3" if word == "N" else "synthetic_small" if word == "RECIPE" else word
        for word in words[len(path) :]
    ]
    context = by_path[path].make_context(" ".join(path), arguments)
    settings = [
        each
        for each in context.params.get("set_") or context.params.get("overrides") or ()
        if each != "a.b=v"
    ]
    if path == ("train",) and settings:
        load_recipe(context.params["recipe"] or "synthetic_small", settings)


@cache
def commands():
    return list(describe_commands_module().commands())


@cache
def describe_commands_module():
    spec = spec_from_file_location("commands_of_docs", ROOT / "docs" / "commands.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_installed_is_there():
    """A clone, extras of an installed pibroch, or what these need: pibroch is on no index."""
    files = {*GUIDES, *NOTES, *ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")}
    for folder in ("src", "examples", "recipes"):
        files |= {path for path in (ROOT / folder).rglob("*") if path.is_file()}
    problems = []
    for path in sorted(path for path in files if path.suffix != ".pyc"):
        page = path.read_text(errors="replace")
        for words in PIP_INSTALL.findall(page):
            problems += [
                f"{path.relative_to(ROOT)}: pip install {words}: {problem}"
                for problem in problems_of_install(words.replace("\\", ""), page)
            ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("'.[serve]' grpcio", None),
        ("/usr/src", None),
        ("/opt", "no /opt in pyproject.toml"),
        ("pibroch", "pibroch is on no index; do: pip install . in a clone"),
        ("'pibroch[servers]'", "no extra servers in pyproject.toml"),
        ("torchrek", "no torchrek in pyproject.toml"),
    ],
)
def test_what_cannot_be_installed(words, problem):
    assert problems_of_install(words, "COPY . /usr/src") == ([problem] if problem else [])


def problems_of_install(words, page):
    """What pip would not find, of the words behind `pip install`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(each for extra in extras.values() for each in extra)]
    distributions = {re.match(r"[\w.-]+", each)[0] for each in needed}
    problems = []
    for word in shlex.split(words):
        if word in ("-e", "--editable", ".") or f"COPY . {word}\n" in f"{page}\n":
            continue
        requirement = REQUIREMENT.fullmatch(word)
        name, named = requirement.groups() if requirement else (word, None)
        if name == "pibroch" and not named:
            problems.append("pibroch is on no index; do: pip install . in a clone")
        elif name in (".", "pibroch"):
            unknown = set(named.split(",")) - extras.keys()
            problems += [f"no extra {extra} in pyproject.toml" for extra in sorted(unknown)]
        elif name not in distributions:
            problems.append(f"no {name} in pyproject.toml")
    return problems


def test_every_command_is_described():
    page = describe_commands_module().describe_commands()
    for words in (
        "train",
        "data prepare",
        "plan diff",
        "checkpoint convert",
        "embedding-server",
        "bench",
    ):
        assert f"## pibroch {words}\n" in page
    assert "`--resume`" in page


def test_the_front_page_leads_to_each_guide_with_one_click():
    page = (ROOT / "docs" / "index.md").read_text()
    for words, guide in {
        "my data": "data",
        "my model": "my-model",
        "several machines": "distributed",
        "serving": "serving",
    }.items():
        (row,) = [line for line in page.splitlines() if f"**{words}**" in line]
        assert f"({guide}.md)" in row
    for path in (ROOT / "docs").glob("*.md"):
        assert path.stem == "index" or f"\n{path.stem}\n" in page, (
            f"{path.name} is in no table of contents"
        )


@pytest.mark.skipif(
    not all(map(find_spec, ("sphinx", "myst_parser", "furo"))),
    reason="the tools of `make docs` are absent",
)
def test_the_site_builds_without_a_warning(tmp_path):
    with Program(
        "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "dummy", ROOT / "docs", tmp_path
    ) as sphinx:
        ran = sphinx.end(200)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/design").glob("0*.md")), ids=lambda path: path.stem
)
def test_a_design_note_is_short_and_says_what_was_decided(path):
    text = path.read_text()
    assert len(words_of(text)) <= 600
    assert text.startswith(f"# {path.stem[:4]}: ")
    assert "\n## Decided\n" in text


def test_files_that_a_page_names_are_there():
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    ).stdout.split()
    elsewhere = {
        "dlrm_s_pytorch.py",
        "papers/bls.md",
        "first_call.py",
        "schema.toml",
        "recipe.toml",
        "best.toml",
    }
    assert not [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (*GUIDES, *NOTES)
        for name in re.findall(r"`([\w/.-]+\.(?:py|md|toml))`", path.read_text())
        if files
        and name not in elsewhere
        and not any(f"/{each}".endswith(f"/{name}") for each in files)
    ]


def test_the_readme_is_read_in_a_few_minutes():
    assert len(words_of((ROOT / "README.md").read_text())) <= 900


def words_of(text):
    """What a reader sees: comments, in which figures have their sources, are left out."""
    return COMMENT.sub("", text).split()
