"""A run on one machine: nothing of it listens where another machine could reach it."""

import os
from ipaddress import ip_address
from pathlib import Path
from socket import htonl

import pytest
from launched_team import Team, processes_of
from test_servers_train import SERVERS

from pibroch.config import to_toml
from small_run import make_config

LISTENING = "0A"
ENDLESS = ["train.epochs=1000", "data.processors=1"]


def listening(pid):
    """Addresses at which a process listens."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(entry))
        except FileNotFoundError:  # closed meanwhile
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            local = words[1]
            state = words[3]
            if state == LISTENING and f"socket:[{words[9]}]" in sockets:
                yield address_of(local.partition(":")[0])


def address_of(text):
    """The kernel writes words of 32 bits in the order of the machine."""
    words = [htonl(int(text[at : at + 8], 16)) for at in range(0, len(text), 8)]
    address = ip_address(b"".join(word.to_bytes(4, "big") for word in words))
    return getattr(address, "ipv4_mapped", None) or address


@pytest.mark.parametrize("kind", ["alltoall", "servers"])
def test_ranks_and_what_they_start_listen_on_loopback_alone(data, tmp_path, kind):
    recipe = tmp_path / "recipe.toml"
    run = tmp_path / "run"
    settings = [*SERVERS, *ENDLESS] if kind == "servers" else ENDLESS[:1]
    recipe.write_text(to_toml(make_config(data, *settings).model_dump()))
    with Team(recipe, "--run-dir", run, "--ranks", 2) as team:
        ranks = team.wait_for_step(run, 2)
        others = [processes_of(ranks[0], name) for name in ("embedding-server", "data-processor")]
        assert [len(each) for each in others] == ([2, 1] if kind == "servers" else [0, 0])
        pids = [
            team.process.pid,
            *ranks.values(),
            *(pid for each in others for pid in each.values()),
        ]
        addresses = {pid: list(listening(pid)) for pid in pids}
    assert len(addresses[ranks[0]]) >= 2  # the store, and gloo
    assert all(each.is_loopback for result in addresses.values() for each in result), addresses
