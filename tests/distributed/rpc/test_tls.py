"""TLS: certificates of the job's authority are admitted on both sides, others are not."""

import shutil
import socket
import ssl
import threading

import pytest
import torch
from rpc_team import Team, Worker, join

from certificates import authority, openssl, signed
from pibroch import rpc
from pibroch.errors import ConfigError, RpcError
from pibroch.wire.tls import client_context, server_context

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        shutil.which("openssl") is None, reason="makes its certificates with openssl"
    ),
]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    ours = authority(folder, "ours")
    other = authority(folder, "theirs")
    return {
        "ann": signed(folder, "ann", ours),
        "ben": signed(folder, "ben", ours),
        "eve": signed(folder, "eve", other),
    }


def exchange_a_byte(server, client):
    """One byte each way over TLS; returns what server and client got or raised."""
    outcome = {}
    left, right = socket.socketpair()

    def side(name, connection, context, server_side, first):
        connection.settimeout(20)
        try:
            with context.wrap_socket(connection, server_side=server_side) as secure:
                secure.sendall(first)
                outcome[name] = secure.recv(1), secure.version()
        except (ssl.SSLError, OSError) as error:
            outcome[name] = error
        finally:
            connection.close()

    thread = threading.Thread(target=side, args=("server", left, server, True, b"s"))
    thread.start()
    side("client", right, client, False, b"c")
    thread.join(30)
    return outcome["server"], outcome["client"]


def test_workers_of_one_authority_talk(certificates):
    at_server, at_client = exchange_a_byte(
        server_context(certificates["ann"]), client_context(certificates["ben"])
    )
    assert at_server == (b"c", "TLSv1.3") and at_client == (b"s", "TLSv1.3")


def test_a_client_of_another_authority_is_refused(certificates):
    certificate, key, _ = certificates["eve"]
    # trusts us, but is not trusted
    client = client_context((certificate, key, certificates["ann"][2]))
    at_server, _ = exchange_a_byte(server_context(certificates["ann"]), client)
    assert isinstance(at_server, ssl.SSLCertVerificationError)


def test_a_server_of_another_authority_is_refused(certificates):
    certificate, key, _ = certificates["eve"]
    server = server_context((certificate, key, certificates["ann"][2]))
    _, at_client = exchange_a_byte(server, client_context(certificates["ben"]))
    assert isinstance(at_client, ssl.SSLCertVerificationError)


def test_a_client_without_certificate_is_refused(certificates):
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(certificates["ann"][2])
    at_server, _ = exchange_a_byte(server_context(certificates["ann"]), client)
    assert isinstance(at_server, ssl.SSLError)


def test_old_versions_are_refused(certificates):
    client = client_context(certificates["ben"])
    with pytest.warns(DeprecationWarning):
        client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_1
    at_server, at_client = exchange_a_byte(server_context(certificates["ann"]), client)
    assert isinstance(at_server, (ssl.SSLError, OSError)) and isinstance(
        at_client, (ssl.SSLError, OSError)
    )


def test_files_that_cannot_be_used_are_named(certificates, tmp_path):
    certificate, key, authorities = certificates["ann"]
    with pytest.raises(ConfigError, match="TLS certificate /nowhere, which cannot be read"):
        server_context(("/nowhere", key, authorities))
    with pytest.raises(ConfigError, match="TLS authorities"):
        client_context((certificate, key, str(tmp_path)))
    with pytest.raises(ConfigError, match="its unencrypted PEM key"):
        server_context((certificate, certificates["ben"][1], authorities))
    empty = tmp_path / "empty"
    empty.write_text("nothing")
    with pytest.raises(ConfigError, match="certificates in PEM"):
        client_context((certificate, key, str(empty)))
    with pytest.raises(ConfigError, match="2 files"):
        client_context((certificate, key))


def test_an_encrypted_key_is_refused_and_does_not_ask(certificates, tmp_path):
    certificate, key, authorities = certificates["ann"]
    encrypted = tmp_path / "encrypted.key"
    openssl("ec", "-in", key, "-aes128", "-passout", "pass:word", "-out", encrypted)
    with pytest.raises(ConfigError, match="unencrypted"):
        server_context((certificate, str(encrypted), authorities))


def identity(value):
    return value


def call_sizes(to):
    for size in (0, 1, 5000, 100_000, 3_000_001):
        sent = torch.arange(size, dtype=torch.float32)
        assert torch.equal(rpc.rpc_sync(to, identity, (sent,)), sent)
    return True


def call_as_stranger(port, files, secret, seconds):
    """Join with other files for TLS and call; the error's name."""
    join("stranger", 5, 2, port, {"tls": files, "shared_memory": False, "secret": secret})
    try:
        return rpc.rpc_sync("worker0", identity, (1,), timeout=seconds)
    except RpcError as error:
        return type(error).__name__
    finally:
        rpc.shutdown(graceful=False)


def test_workers_call_each_other_over_tls_and_strangers_cannot(certificates):
    secret = "known to all, the stranger too"
    team = Team(2, tls=certificates["ann"], shared_memory=False, num_streams=2, secret=secret)
    strangers = [Worker(), Worker()]
    try:
        assert team.run(0, call_sizes, "worker1") and team.run(1, call_sizes, "worker0")
        certificate, key, _ = certificates["eve"]
        files = (certificate, key, certificates["ann"][2])  # trusts us, but is not trusted
        assert (
            strangers[0].run(call_as_stranger, team.port, files, secret, 20.0) == "WorkerLostError"
        )
        # plain TCP: silence
        assert strangers[1].run(call_as_stranger, team.port, None, secret, 1.0) == "RpcTimeoutError"
        assert team.run(0, call_sizes, "worker1")
    finally:
        for worker in (*strangers, team):
            worker.close()
