"""Endpoints: where the daemon's front socket is, and with which keys, as both of its ends compute it.

Owns the reading of `--endpoint`, `--keys`, `--client` and `--insecure`. Must never open a socket.
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


class FrontClient(NamedTuple):
    """What a front end connects to."""

    endpoint: str
    keys: ClientKeys | None
    insecure: bool


def front_server(settings: Settings, run_dir: RunDir) -> FrontServer:
    """The daemon's side; raises ConfigError for keys that cannot be read."""
    try:
        keys = load_server_keys(Path(settings.keys)) if settings.keys else None
    except (KeyFileError, OSError) as error:
        raise ConfigError(f"--keys: {error}") from error
    return FrontServer(settings.endpoint or run_dir.front_endpoint, keys, settings.insecure)


def front_client(settings: Settings, run_dir: RunDir) -> FrontClient:
    """A front end's side; raises ConfigError for keys that cannot be read."""
    try:
        keys = load_client_keys(Path(settings.keys), settings.client) if settings.keys else None
    except (KeyFileError, OSError) as error:
        raise ConfigError(f"--keys: {error}") from error
    return FrontClient(settings.endpoint or run_dir.front_endpoint, keys, settings.insecure)
