"""TLS between hosts: both sides show a certificate that the job's authorities signed.

Host names are not checked: workers are dialled by address, and the handshake on top names the
worker that was dialled.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from pibroch.errors import ConfigError

_ROLES = ("certificate", "key", "authorities")


def server_context(files: tuple[str, str, str]) -> ssl.SSLContext:
    """For connections that were accepted.

    Args:
        files: certificate, its key and the authorities to trust, all PEM.

    Raises:
        ConfigError: when a file cannot be read or used.
    """
    return _context(ssl.PROTOCOL_TLS_SERVER, files)


def client_context(files: tuple[str, str, str]) -> ssl.SSLContext:
    """For connections that were dialled, otherwise as ``server_context``."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, files)


def _context(protocol: int, files: tuple[str, str, str]) -> ssl.SSLContext:
    if len(files) != 3:
        raise ConfigError(
            f"{len(files)} files for TLS",
            "three: " + ", ".join(_ROLES),
            "set RpcBackendOptions.tls",
        )
    for role, path in zip(_ROLES, files, strict=True):
        _readable(role, path)
    certificate, key, authorities = files
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    try:
        # an encrypted key must not ask at the terminal
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"certificate {certificate} with key {key} ({error})",
            "a PEM certificate and its unencrypted PEM key",
        ) from error
    try:
        context.load_verify_locations(authorities)
    except ssl.SSLError as error:
        raise ConfigError(f"authorities {authorities} ({error})", "certificates in PEM") from error
    return context


def _readable(role: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(
            f"the TLS {role} {path}, which cannot be read ({error.strerror})",
            "paths of certificate, key and authorities",
            "see RpcBackendOptions.tls",
        ) from error
