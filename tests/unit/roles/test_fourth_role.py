"""A role that the house does not know, whole in this one file.

Its command, its count, its place and what it does.
"""

import os
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console
from typer.main import get_command

from doc_pages import ROOT
from forked import Program
from pibroch.cli.role_commands import command_of
from pibroch.cli.roles import layout
from pibroch.config import load_recipe
from pibroch.config.exchange import (
    EXCHANGES,
    ExchangeSection,
    ExchangeSpec,
    register_exchange,
)
from pibroch.errors import ConfigError
from pibroch.launch.job import Restarts
from pibroch.launch.roles import to_start, wanted
from pibroch.launch.torchrun import part, shared
from pibroch.roles import Role, RoleOption, register_role, registry, roles
from pibroch.train.job import training_job

ROLE = Role(
    title="score keeper",
    worker="keeper",
    command="score-keeper",
    functions=__name__,
    block=9,
    folder="keepers",
    options={"limit": RoleOption(int, "Most scores that it keeps.", 10)},
    help="Keep scores for trainers.",
)


class KeepingSection(ExchangeSection):
    name: Literal["keeping"] = "keeping"
    keepers: int = 2

    def helpers(self):
        return {"score-keeper": self.keepers}

    def duties(self):
        return {"score-keeper": "keeps what is scored"}


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(EXCHANGES, "_registered", {})
    register_role(ROLE)
    register_exchange(ExchangeSpec("keeping", "keeps scores", KeepingSection, print))
    return load_recipe(
        "synthetic_small", ["embedding.exchange=keeping", "embedding.exchange.keepers=3"]
    )


def test_a_recipe_counts_it_and_it_has_ranks_behind_the_others(known):
    assert wanted(known) == to_start(known) == {ROLE: 3}
    job = shared(training_job(known, Path("run"), ["train"], 1, Restarts()), 6)
    group, number = part(job, 4)
    assert job.num_ranks == 3 and (group.role, number) == ("score-keeper", 1)


def test_it_is_described(known):
    with (console := Console(width=200)).capture() as shown:
        console.print(layout(known, 2))
    (row,) = [line.split() for line in shown.get().splitlines() if "score keeper" in line]
    assert row == ["score", "keeper", "3", "this", "command", "keeps", "what", "is", "scored"]


def test_it_has_a_command_with_its_own_option(known):
    import typer

    app = typer.Typer(add_completion=False)
    app.command(ROLE.command)(command_of(ROLE))
    command = get_command(app)
    assert command.help == "Keep scores for trainers."
    context = command.make_context(
        "score-keeper", ["--rendezvous", "tcp://a:1", "--number", "2", "--limit", "5"]
    )
    assert {name: context.params[name] for name in ("rendezvous", "number", "limit")} == {
        "rendezvous": "tcp://a:1",
        "number": 2,
        "limit": 5,
    }
    assert {"threads", "with_servers"} <= context.params.keys()


@pytest.mark.parametrize("name", ["command", "worker", "block"])
def test_two_roles_share_no_name(known, name):
    register_role(ROLE)
    assert [role.command for role in roles()].count("score-keeper") == 1
    other = {"title": "other", "worker": "other", "command": "other", "block": 8}
    with pytest.raises(ConfigError, match=r"a second role"):
        register_role(
            Role(**other | {name: getattr(ROLE, name)}, functions="f", folder="f", help="")
        )
    with pytest.raises(ConfigError, match=r"the trainers'"):
        register_role(Role(**other | {"block": 1}, functions="f", folder="f", help=""))


def test_processes_of_the_example_start_serve_and_end(tmp_path):
    with Program(ROOT / "examples" / "own_role.py", env=dict(os.environ), cwd=tmp_path) as program:
        ran = program.end(100)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "1000 reads; the even ids that were read most: [(0, 296), (2, 143)]\n"
    assert {path.name for path in (tmp_path / "runs" / "counters").iterdir()} == {"0.log", "1.log"}


def test_a_module_that_nobody_installed_has_its_command():
    env = {**os.environ, "PIBROCH_ROLES": "own_role", "PYTHONPATH": str(ROOT / "examples")}
    with Program(
        "-m", "pibroch.cli.main", "read-counter", "--help", env=env, cwd=ROOT / "examples"
    ) as program:
        ran = program.end(100)
    assert ran.returncode == 0 and "Count which ids trainers read." in ran.stdout, ran.stderr
