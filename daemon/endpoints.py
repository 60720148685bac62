"""Endpoints: where the daemon's sockets are, and with which keys, as both of their ends compute it.

Owns the reading of `--endpoint`, `--ranks-endpoint`, `--keys`, `--client` and `--insecure`. Must never open a socket.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from daemon.config import ConfigError
from daemon.run_dir import RunDir
from daemon.settings_table import Settings
from ipc.errors import KeyFileError
from ipc.keys import ClientKeys, ServerKeys, load_client_keys, load_server_keys


class FrontServer(NamedTuple):
    """What the daemon binds."""

    endpoint: str
    keys: ServerKeys | None
    insecure: bool


class RanksServer(NamedTuple):
    """What the daemon binds for its ranks, and what a rank that it starts itself is told about keys."""

    endpoint: str
    keys: ServerKeys | None
    insecure: bool
    rank_arguments: list[str]


class FrontClient(NamedTuple):
    """What a front end connects to."""

    endpoint: str
    keys: ClientKeys | None
    insecure: bool


def front_server(settings: Settings, run_dir: RunDir) -> FrontServer:
    """The daemon's side; raises ConfigError for keys that cannot be read."""
    return FrontServer(settings.endpoint or run_dir.front_endpoint, _server_keys(settings), settings.insecure)


def ranks_server(settings: Settings, run_dir: RunDir) -> RanksServer:
    """The daemon's side of the rank streams; keys only where they leave the host. Raises ConfigError as above."""
    endpoint = settings.ranks_endpoint or run_dir.ranks_endpoint
    if not endpoint.startswith("tcp://"):
        return RanksServer(endpoint, None, settings.insecure, [])
    keys = _server_keys(settings)
    arguments = ["--keys", settings.keys] if settings.keys else ["--insecure"] if settings.insecure else []
    return RanksServer(endpoint, keys, settings.insecure, arguments)


def _server_keys(settings: Settings) -> ServerKeys | None:
    try:
        return load_server_keys(Path(settings.keys)) if settings.keys else None
    except (KeyFileError, OSError) as error:
        raise ConfigError(f"--keys: {error}") from error


def front_client(settings: Settings, run_dir: RunDir) -> FrontClient:
    """A front end's side; raises ConfigError for keys that cannot be read."""
    try:
        keys = load_client_keys(Path(settings.keys), settings.client) if settings.keys else None
    except (KeyFileError, OSError) as error:
        raise ConfigError(f"--keys: {error}") from error
    return FrontClient(settings.endpoint or run_dir.front_endpoint, keys, settings.insecure)
