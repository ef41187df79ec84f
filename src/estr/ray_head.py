"""The head of a Ray cluster: is one there? Ray itself would try for minutes, deaf to Ctrl-C."""

from __future__ import annotations

import importlib.util
import os
import socket

from .errors import ConfigError

_CONNECT_TIMEOUT_S = 20.0

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a client of gRPC begins, with an empty SETTINGS frame (RFC 9113, 3.4)."""
_FRAME_HEADER_BYTES = 9
_SETTINGS = 4
"""The type, fourth byte of a frame's header, with which every server of gRPC answers."""


def require_head(address: str) -> None:
    """Raise ConfigError unless somebody listens at "auto" or HOST:PORT who speaks gRPC, as the
    head of a cluster does. Without Ray nobody knows what "auto" is, and nothing is raised."""
    if address == "auto" and importlib.util.find_spec("ray") is None:
        return
    host, _, port = _meant(address).rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S) as listener:
            if os.environ.get("RAY_USE_TLS", "0") != "1":
                _require_grpc(listener)
    except (OSError, OverflowError, ValueError) as error:
        raise unreachable(address, f"{host}:{port}: {error}") from error


def unreachable(address: str, why: str) -> ConfigError:
    """What to say where no cluster answers."""
    return ConfigError(
        f"ray.address = {address!r}: no Ray cluster can be reached there ({why}); start one with "
        "`ray start --head`, or say ray.address = 'local'"
    )


def _meant(address: str) -> str:
    """What "auto" stands for: RAY_ADDRESS, or what `ray start` has left on this machine, where the
    cluster may have ended without a word. Raises ConfigError where there is neither."""
    if address != "auto":
        return address
    from ray._private import services

    try:
        found: str = services.canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError) as error:
        raise unreachable(address, str(error)) from error
    return found


def _require_grpc(listener: socket.socket) -> None:
    listener.sendall(_HTTP2_PREFACE)
    header = b""
    while len(header) < _FRAME_HEADER_BYTES:
        more = listener.recv(_FRAME_HEADER_BYTES - len(header))
        if not more:
            break
        header += more
    if len(header) < _FRAME_HEADER_BYTES or header[3] != _SETTINGS:
        raise ConnectionError("what listens there is no head of a Ray cluster, whose port is 6379")
