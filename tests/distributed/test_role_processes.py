"""Processes of roles that end before their time."""

import os
import signal
import time
from pathlib import Path

import pytest
from launched_team import wait_until

from pibroch.errors import TrainingError
from pibroch.launch.beside import started
from pibroch.process import LAST_WORDS, LAUNCHER
from pibroch.roles import EMBEDDING_SERVER
from pibroch.roles.group import join, leave, say_lost


def children():
    """Of this thread."""
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


def test_a_process_that_ended_before_trainers_joined_is_lost_and_not_waited_for(tmp_path):
    before = children()
    with started({EMBEDDING_SERVER: 1}, tmp_path, 1) as rendezvous:
        (server,) = children() - before
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{server}").exists())
        start = time.monotonic()
        with pytest.raises(
            TrainingError, match="embedding server 0, which ended with signal SIGKILL"
        ) as result:
            join(rendezvous, {EMBEDDING_SERVER: 1}, 0)
        assert time.monotonic() - start < 10
        assert result.value.is_loss
    with started({EMBEDDING_SERVER: 1}, tmp_path / "again", 1) as rendezvous:
        wait_until(lambda: "is ready at" in (tmp_path / "again" / "servers" / "0.log").read_text())
        say_lost(rendezvous, EMBEDDING_SERVER, 0, "ended long ago")
        assert join(rendezvous, {EMBEDDING_SERVER: 1}, 0) == {
            EMBEDDING_SERVER: ("embedding0",)
        }  # as another is there
        leave()


def test_a_process_of_a_role_has_nothing_of_the_rank_that_started_it(tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", LAUNCHER, LAST_WORDS):
        monkeypatch.setenv(name, "7")
    before = children()
    with started({EMBEDDING_SERVER: 1}, tmp_path, 1):
        (server,) = children() - before
        variables = Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
    assert not [each for each in variables if each.endswith(b"=7")]
