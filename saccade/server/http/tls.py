"""TLS of the listening socket: the server's certificate, and that of clients where they must have one."""

from __future__ import annotations

import ssl

from saccade.errors import ConfigError
from saccade.server_options import ServerOptions


def tls_context(server: ServerOptions) -> ssl.SSLContext | None:
    """None without a certificate. ConfigError if a file cannot be used."""
    if server.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, server)
    if server.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(server.ssl_ca_certs)
        except OSError as error:
            problem = f"ssl_ca_certs={server.ssl_ca_certs} cannot be used"
            raise ConfigError(f"{problem}: {_reason(error)}; it must be a file of PEM certificates") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def load_certificate(context: ssl.SSLContext, server: ServerOptions) -> None:
    """Also into a context in use: new connections get the new certificate."""
    cert, key = server.ssl_certfile, server.ssl_keyfile
    assert cert is not None
    try:
        context.load_cert_chain(cert, key, password=_refuse_password)
    except OSError as error:
        problem = f"ssl_certfile={cert} and ssl_keyfile={key or cert} cannot be used: {_reason(error)}"
        raise ConfigError(f"{problem}; they must be a PEM certificate, with its chain, and its key") from None


def _refuse_password() -> str:
    """Without it OpenSSL would ask at the terminal."""
    raise ConfigError("the key of ssl_keyfile has a passphrase; a server needs one without")


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)
