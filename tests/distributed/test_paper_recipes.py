"""Each recipe of an exchange trains, by the commands that its comment names.

The page that it names has them too.
"""

import json
import re
import shlex
from pathlib import Path

import pytest

from small_run import run_command

ROOT = Path(__file__).parents[2]
SMALL = """
extends = "{name}"
[data.synthesize]
rows = 2000
max_table_rows = 40
[train]
epochs = 1
"""


@pytest.mark.parametrize("exchange", ["lookahead", "retrieve", "towers"])
def test_the_commands_of_a_recipe_train_by_its_exchange(exchange, tmp_path):
    name = f"synthetic_small_{exchange}"
    text = (ROOT / "recipes" / f"{name}.toml").read_text()
    pages = [
        re.sub(r"\\\n\s*", "", (ROOT / page).read_text())  # a command may go on in the next line
        for page in re.findall(r"docs/\w+\.md", text)
    ]
    commands = re.findall(r"^#   pibroch (.*)$", text, re.MULTILINE)
    assert commands and all(any(command in page for page in pages) for command in commands)
    (tmp_path / "small.toml").write_text(SMALL.format(name=name))
    for command in commands:
        words = shlex.split(command.replace(name, "small.toml"))
        done = run_command(*words, cwd=tmp_path, env={"PIBROCH_CACHE": str(tmp_path / "cache")})
        assert done.returncode == 0, done.stderr
    (summary,) = tmp_path.glob("runs/small-*/summary.json")
    result = json.loads(summary.read_text())
    assert result["exchange"] == exchange and result["world_size"] == 2
