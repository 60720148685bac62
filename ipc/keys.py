"""Keys: CURVE key files for tcp endpoints. Who may connect is whose public key lies in the daemon's directory.

Owns the file layout and its permissions. Must never log or print a secret. Layout of a key directory:

    DIR/daemon.secret   0600   the daemon's pair            DIR/clients/NAME.secret  0600   one client's pair
    DIR/daemon.public   0644   what a client must know      DIR/clients/NAME.public  0644   what the daemon lets in

A file is TOML with `public` and, in `.secret` files, `secret`: 40 characters each (Z85 of 32 bytes).
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from ipc.errors import KeyFileError

KEY_CHARACTERS = 40
CLIENTS = "clients"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The daemon's pair and the public keys of the clients that may connect, Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A client's pair and the public key it expects of the daemon, Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    server_public: bytes = b""


def make_keys(directory: Path, clients: list[str]) -> list[Path]:
    """Make the daemon's pair where it is missing, and a new pair per client; the paths written.

    Raises KeyFileError for a bad client name or one that exists: keys are never overwritten.
    """
    for name in clients:
        if not _NAME.fullmatch(name):
            raise KeyFileError(f"client name {name!r}: use letters, digits, '.', '_' and '-', at most 64")
        if (directory / CLIENTS / f"{name}.secret").exists():
            raise KeyFileError(f"client {name!r} has keys in {directory}: remove its two files first to replace them")
    for folder in (directory, directory / CLIENTS):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    written: list[Path] = []
    if not (directory / "daemon.secret").exists():
        written += _write_pair(directory / "daemon")
    for name in clients:
        written += _write_pair(directory / CLIENTS / name)
    return written


def load_server_keys(directory: Path) -> ServerKeys:
    """The daemon's side of a key directory; raises KeyFileError."""
    public, secret = _read_secret(directory / "daemon.secret")
    allowed = frozenset(_read_public(path) for path in sorted((directory / CLIENTS).glob("*.public")))
    if not allowed:
        raise KeyFileError(f"no client key in {directory / CLIENTS}: nobody could connect; run `bandmaster keys`")
    return ServerKeys(public, secret, allowed)


def load_client_keys(directory: Path, name: str) -> ClientKeys:
    """A client's side of a key directory; raises KeyFileError."""
    public, secret = _read_secret(directory / CLIENTS / f"{name}.secret")
    return ClientKeys(public, secret, _read_public(directory / "daemon.public"))


def _write_pair(stem: Path) -> list[Path]:
    public, secret = zmq.curve_keypair()
    lines = f'public = "{public.decode()}"\n'
    secret_path, public_path = stem.with_name(stem.name + ".secret"), stem.with_name(stem.name + ".public")
    _write(secret_path, f'# CURVE pair. Keep it private.\n{lines}secret = "{secret.decode()}"\n', 0o600)
    _write(public_path, f"# CURVE public key.\n{lines}", 0o644)
    return [secret_path, public_path]


def _write(path: Path, text: str, mode: int) -> None:
    """Write a new file whose mode holds from the first byte on."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(text)


def _read_secret(path: Path) -> tuple[bytes, bytes]:
    table = _read(path)
    mode = path.stat().st_mode
    if mode & 0o077:
        raise KeyFileError(f"{path} has mode {stat.S_IMODE(mode):04o}, others can use it: run `chmod 600 {path}`")
    return _key(path, table, "public"), _key(path, table, "secret")


def _read_public(path: Path) -> bytes:
    return _key(path, _read(path), "public")


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        directory = path.parent.parent if path.parent.name == CLIENTS else path.parent
        raise KeyFileError(f"the key file {path} does not exist: run `bandmaster keys {directory}`") from None
    except (OSError, ValueError) as error:
        raise KeyFileError(f"the key file {path} cannot be read: {error}") from error


def _key(path: Path, table: dict[str, object], name: str) -> bytes:
    """Z85 has quotes and backslashes nowhere, so a TOML string holds it as it is."""
    value = table.get(name)
    if not isinstance(value, str) or len(value) != KEY_CHARACTERS:
        raise KeyFileError(f"{path}: `{name}` must be a string of {KEY_CHARACTERS} characters")
    return value.encode("ascii")
