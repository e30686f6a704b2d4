"""Where the processes of a run meet, as far as no other process is needed."""

import pytest

from pibroch.errors import ConfigError
from pibroch.roles import roles
from pibroch.roles.group import join, serve, tls_of


def test_tls_is_three_paths_or_none():
    assert tls_of({}) is None and tls_of({"PIBROCH_SERVERS_TLS": ""}) is None
    assert tls_of({"PIBROCH_SERVERS_TLS": "a.pem,b.key,c.pem"}) == ("a.pem", "b.key", "c.pem")
    with pytest.raises(ConfigError, match="CERTIFICATE,KEY,AUTHORITIES"):
        tls_of({"PIBROCH_SERVERS_TLS": "a.pem,b.key"})


@pytest.mark.parametrize(
    "rendezvous", ["10.0.0.5:29600", "tcp://10.0.0.5", "http://a:1", "tcp://a:x", "tcp://:9"]
)
@pytest.mark.parametrize("role", roles())
def test_a_meeting_place_has_host_and_port(role, rendezvous):
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        join(rendezvous, {role: 1}, 0)


@pytest.mark.parametrize("role", roles())
def test_processes_of_a_role_have_numbers(role):
    with pytest.raises(ConfigError, match=f"{role.title} -1"):
        serve(role, "tcp://127.0.0.1:9", -1, True)


def test_no_two_workers_have_one_name_or_id():
    names = [role.name(number) for role in roles() for number in (0, 7)]
    ids = [role.first_id + number for role in roles() for number in (0, 7)]
    assert len(set(names)) == len(set(ids)) == 2 * len(roles())
