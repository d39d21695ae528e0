"""TLS of the listening socket: the server's certificate, and that of clients where they must have one."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from saccade.errors import ConfigError
from saccade.options.server import ServerOptions
from saccade.util.plain_files import read_plain

_MAX_BYTES = 16 << 20  # of a file; the authorities of a whole system have a fifth of a MiB


class Certificate:
    """A chain and its key, as their files were when they were read: loading them waits for no disk."""

    def __init__(self, server: ServerOptions) -> None:
        """ConfigError if they cannot be used; a bad pair would spoil the one in use."""
        assert server.ssl_certfile is not None
        cert = server.ssl_certfile
        key = server.ssl_keyfile or cert  # one file may have both
        try:
            self._chain = read_plain(cert, _MAX_BYTES)
            self._key = self._chain if key == cert else read_plain(key, _MAX_BYTES)  # one file is read once
            self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        except OSError as error:
            problem = f"ssl_certfile={cert} and ssl_keyfile={key} cannot be used: {_reason(error)}"
            rule = "they must be a PEM certificate, with its chain, and its key"
            raise ConfigError(f"{problem}; {rule}") from None

    def load_into(self, context: ssl.SSLContext) -> None:
        """Also one in use: new connections get this certificate."""
        with _in_memory(self._chain) as chain, _in_memory(self._key) as key:
            context.load_cert_chain(chain, key, password=_refuse_password)


def tls_context(server: ServerOptions) -> ssl.SSLContext | None:
    """None without a certificate. ConfigError if a file cannot be used."""
    if server.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    Certificate(server).load_into(context)
    if server.ssl_ca_certs is not None:
        try:
            with _in_memory(read_plain(server.ssl_ca_certs, _MAX_BYTES)) as authorities:
                context.load_verify_locations(authorities)
        except OSError as error:
            problem = f"ssl_ca_certs={server.ssl_ca_certs} cannot be used"
            raise ConfigError(f"{problem}: {_reason(error)}; it must be a file of PEM certificates") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """The name of a file that has them: the ssl module reads files alone, and would wait at a pipe."""
    if not hasattr(os, "memfd_create"):  # macOS
        with tempfile.NamedTemporaryFile(prefix="saccade-pem-", buffering=0) as private:
            private.write(data)
            yield private.name
        return
    with os.fdopen(os.memfd_create("saccade-pem"), "wb", buffering=0) as file:
        file.write(data)
        yield f"/proc/self/fd/{file.fileno()}"


def _refuse_password() -> str:
    """Without it OpenSSL would ask at the terminal."""
    raise ConfigError("the key of ssl_keyfile has a passphrase; a server needs one without")


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)
