"""The examples in docstrings of the package and of its benchmarks give what they say."""

import doctest
import importlib
import re
from pathlib import Path

import benchmarks
import pytest

import pibroch

MODULES = [
    ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
    for folder in (Path(pibroch.__file__).parent, Path(benchmarks.__file__).parent)
    for path in sorted(folder.rglob("*.py"))
    if ".venv" not in path.parts  # that of the benchmarks' peers
    and re.search(r"^\s*>>> ", path.read_text(), re.MULTILINE)
]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_give_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    output = []
    for example in doctest.DocTestFinder().find(module):
        runner.run(example, out=output.append)
    assert runner.tries, "an example that the finder does not see"
    assert not runner.failures, "".join(output)
