"""The list of `tools/mutants.py` fits the source, and the tool says what became of each.

The mutants themselves are run by hand.
"""

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from doc_pages import ROOT

SPEC = spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
assert SPEC is not None and SPEC.loader is not None
mutants = module_from_spec(SPEC)
sys.modules["mutants"] = mutants  # its dataclasses look their module up
SPEC.loader.exec_module(mutants)
Mutant, Verdict = mutants.Mutant, mutants.Verdict


@pytest.mark.parametrize("mutant", mutants.read_mutants(), ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made_and_has_tests(mutant):
    source = (ROOT / mutants.PACKAGE / mutant.file).read_text()
    compile(mutant.applied(source), mutant.file, "exec")
    words = list(mutant.tests)
    chosen = words[words.index("-k") + 1] if "-k" in words else ""
    files = [ROOT / word for word in words[: words.index("-k") if chosen else None]]
    paths = [path for file in files for path in ([file] if file.is_file() else file.glob("*.py"))]
    assert paths
    names = [name for path in paths for name in re.findall(r"def (test_\w+)", path.read_text())]
    for part in chosen.split(" or ") if chosen else ():
        assert any(part in name for name in names), f"no test has {part} in its name"


def make_package(folder):
    """A repository with a function and a test of it."""
    package = folder / "src" / "pibroch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "numbers.py").write_text("def larger(a, b):\n    return a if a > b else b\n")
    (folder / "test_numbers.py").write_text(
        "from pibroch.numbers import larger\n"
        "def test_larger(): assert larger(2, 1) == 2 and larger(1, 2) == 2\n"
        "def test_wrong(): assert larger(1, 2) == 1\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\n")
    return package


@pytest.mark.full
def test_what_became_of_each(tmp_path):
    package = make_package(tmp_path)
    before = (package / "numbers.py").read_bytes()
    tests = ("test_numbers.py", "-k", "larger")

    def mutant(text, replacement, words=tests):
        return Mutant(f"{text} {replacement} {words}", "numbers.py", text, replacement, words)

    outcomes = mutants.run(
        [
            mutant("a > b", "a < b"),
            mutant("a > b", "a >= b"),  # as good as the first
            mutant("b", "a"),
            mutant("a > b", "a > (b"),
            mutant("a > b", "a < b", ("test_numbers.py", "-k", "wrong")),
            mutant("a > b", "a < b", ("test_numbers.py", "-k", "nothing")),
        ],
        tmp_path,
    )
    assert [outcome.verdict for outcome in outcomes] == [
        Verdict.KILLED,
        Verdict.SURVIVED,
        Verdict.NOT_APPLIED,
        Verdict.NO_TESTS,
        Verdict.NO_TESTS,
        Verdict.NO_TESTS,
    ]
    assert "need it once" in outcomes[2].reason and "without it" in outcomes[4].reason
    assert (package / "numbers.py").read_bytes() == before


def test_what_takes_too_long_is_ended(tmp_path):
    make_package(tmp_path)
    copy = mutants.Copy(tmp_path, tmp_path / "copy", time_limit_s=0.01)
    assert copy._run(("test_numbers.py",)) == (None, "")


@pytest.mark.parametrize("words", [["--list"], ["--list", "--only", "journal"]])
def test_the_list_is_printed(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["mutants.py", *words])
    mutants.main()
    lines = capsys.readouterr().out.splitlines()
    assert any("data/streams/journal.py" in line for line in lines)
    assert (len(lines) == len(mutants.read_mutants())) == ("--only" not in words)


def test_a_name_that_is_none(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mutants.py", "--only", "no such mutant"])
    with pytest.raises(SystemExit, match="no such mutant"):
        mutants.main()
