"""Where servers and trainers meet, as far as no other process is needed."""

import pytest

from pibroch.errors import ConfigError
from pibroch.servers.group import join, serve, tls_of


def test_tls_is_three_paths_or_none():
    assert tls_of({}) is None and tls_of({"PIBROCH_SERVERS_TLS": ""}) is None
    assert tls_of({"PIBROCH_SERVERS_TLS": "a.pem,b.key,c.pem"}) == ("a.pem", "b.key", "c.pem")
    with pytest.raises(ConfigError, match="CERTIFICATE,KEY,AUTHORITIES"):
        tls_of({"PIBROCH_SERVERS_TLS": "a.pem,b.key"})


@pytest.mark.parametrize("meet", ["10.0.0.5:29600", "tcp://10.0.0.5", "http://a:1", "tcp://a:x", "tcp://:9"])
def test_a_meeting_place_has_host_and_port(meet):
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        join(meet, 1, 0)


def test_servers_have_numbers():
    with pytest.raises(ConfigError, match="server -1"):
        serve("tcp://127.0.0.1:9", -1)
