"""Configuration: from flags, environment and a TOML file to one validated `Settings`.

Owns parsing, validation and rendering over the settings table. Must never start anything. Precedence: flag, then
environment (`BANDMASTER_...`), then `--config FILE`, then default. A bad value is refused with its name, where it came
from, the value and the range; an unknown key is refused by name.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from daemon.exits import DaemonError, Exit, exit_table
from daemon.layers import LayersError, parse_layers
from daemon.settings_table import BY_KEY, TABLE, Setting, Settings, rows_for

PREFIX = "BANDMASTER_"
SALT = "salt:"  # what `daemon.frontend.prepare.namespace` puts before a cache_salt
# Environment names with our prefix that are not settings: they pass between our own processes, or name the model cache.
INTERNAL = frozenset(
    {"BANDMASTER_CONFIG", "BANDMASTER_CACHE", "BANDMASTER_RANK_TOKEN", "BANDMASTER_PARENT"}
    | {"BANDMASTER_FAULTS", "BANDMASTER_FAULTS_DIR"}
    | {"BANDMASTER_LISTEN_FD", "BANDMASTER_PULSE_FD"}
)
BYTE_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
SECOND_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
HOST = re.compile(r"[0-9A-Za-z._-]+|[0-9A-Fa-f.:]+(%[0-9A-Za-z._-]+)?")
TRUE, FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


WORDS = {
    "switch": "true or false",
    "pairs": "KEY=VALUE without commas",
    "path": "a path",
    "host": "a host name or address, without scheme, port or path",
}


class ConfigError(DaemonError):
    """A setting was refused; the text names it, its source, the value and what is allowed."""

    def __init__(self, text: str) -> None:
        super().__init__(Exit.USAGE, text)


def _range_text(row: Setting) -> str:
    if row.choices:
        return "one of " + ", ".join(row.choices)
    if row.low is None:
        return WORDS.get(row.kind, "text")
    bounds = f"{render_value(row, row.low)} to {render_value(row, row.high)}"
    return f"0 ({row.zero}) or {bounds}" if row.zero else bounds


def _refuse(row: Setting, value: object, source: str) -> ConfigError:
    shown = "(hidden)" if row.kind == "secret" else repr(value)
    return ConfigError(f"{row.flag} ({source}): {shown} is not allowed; allowed: {_range_text(row)}")


def _parse_bytes(value: object) -> int:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGTkmgt]?[Ii]?)[Bb]?\s*", str(value))
    if match is None:
        raise ValueError(value)
    return int(float(match[1]) * BYTE_UNITS[match[2].upper()]) if match[2] else int(match[1])


def _parse_seconds(value: object) -> float:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h)?\s*", str(value))
    if match is None:
        raise ValueError(value)
    return float(match[1]) * SECOND_UNITS[match[2] or ""]


def _parse_int(value: object) -> int:
    if isinstance(value, bool) or not re.fullmatch(r"\s*-?[0-9]+\s*", str(value)):
        raise ValueError(value)
    return int(str(value))


def _parse_fraction(value: object) -> float:
    if isinstance(value, bool) or not re.fullmatch(r"\s*[-+0-9.eE]+\s*", str(value)):
        raise ValueError(value)
    number = float(str(value))
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _parse_switch(value: object) -> bool:
    text = str(value).strip().lower()
    if text not in TRUE | FALSE:
        raise ValueError(value)
    return text in TRUE


def _parse_pairs(value: object) -> dict[str, str]:
    if isinstance(value, dict):
        if any(isinstance(entry, dict | list) for entry in value.values()):
            raise ValueError(value)
        value = [f"{name}={entry}" for name, entry in value.items()]
    entries = value if isinstance(value, list) else [part for part in str(value).split(",") if part.strip()]
    pairs = {}
    for entry in entries:
        name, equals, text = str(entry).partition("=")
        if not equals or not name.strip() or "," in text:
            raise ValueError(entry)
        pairs[name.strip()] = text.strip()
    return pairs


def _parse_text(value: object) -> str:
    if not isinstance(value, str) or "\0" in value or "\n" in value:
        raise ValueError(value)
    return value


def _parse_host(value: object) -> str:
    """A host name or address as a listener takes it: no scheme, port, path or brackets."""
    text = _parse_text(value)
    if not HOST.fullmatch(text) or text.count(":") == 1:
        raise ValueError(value)
    return text


PARSERS: dict[str, Callable[[object], Any]] = {
    "text": _parse_text,
    "host": _parse_host,
    "path": _parse_text,
    "secret": _parse_text,
    "choice": _parse_text,
    "int": _parse_int,
    "fraction": _parse_fraction,
    "bytes": _parse_bytes,
    "seconds": _parse_seconds,
    "switch": _parse_switch,
    "pairs": _parse_pairs,
}


def parse_value(row: Setting, value: object, source: str) -> Any:
    """The typed value of a setting; raises ConfigError naming it, `source`, the value and the range."""
    try:
        parsed = PARSERS[row.kind](value)
    except (ValueError, OverflowError):
        raise _refuse(row, value, source) from None
    if row.choices and parsed not in row.choices:
        raise _refuse(row, value, source)
    if row.low is not None and row.high is not None:
        inside = row.low <= parsed <= row.high or (parsed == 0 and row.zero)
        if not inside:
            raise _refuse(row, value, source)
    return parsed


def render_value(row: Setting, value: Any) -> str:
    """A value as `parse_value` reads it back (secrets included: for a child's environment, never for a log)."""
    if row.kind == "bytes":
        for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value and value % size == 0:
                return f"{int(value) // size}{unit}"
        return str(int(value))
    if row.kind == "switch":
        return "true" if value else "false"
    if row.kind == "pairs":
        return ",".join(f"{name}={text}" for name, text in sorted(value.items()))
    return f"{value:g}" if isinstance(value, float) else str(value)


def build_parser(command: str, about: str) -> argparse.ArgumentParser:
    """The argument parser of one command; absent flags stay absent, so that lower sources show through."""
    parser = argparse.ArgumentParser(
        prog=f"bandmaster {command}", description=about, argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings by flag name")
    parser.add_argument("--print-config", action="store_true", help="print the settings in force and exit")
    for row in rows_for(command):
        text = f"{row.help} [{_range_text(row)}; default {render_value(row, row.default) or 'empty'}]".replace(
            "%", "%%"
        )
        if row.positional:
            parser.add_argument(row.attribute, nargs="?", help=text)
            continue
        options: dict[str, Any] = {"dest": row.attribute, "help": text}
        if row.kind == "switch":
            options |= {"action": "store_const", "const": "true"}
            if row.negation:
                against = f"the opposite of {row.flag}"
                parser.add_argument(row.negation, dest=row.attribute, action="store_const", const="false", help=against)
        elif row.kind == "pairs":
            options |= {"action": "append", "metavar": "KEY=VALUE"}
        else:
            options |= {"metavar": "|".join(row.choices) or row.kind.upper()}
        parser.add_argument(row.flag, *row.aliases, **options)
    return parser


def _unknown(name: str, known: list[str], where: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"{where}: there is no setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _from_file(path: str) -> dict[str, Any]:
    """Values by attribute of a TOML file; raises ConfigError for an unreadable file or an unknown key."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    found = {}
    for name, value in document.items():
        row = BY_KEY.get(name.replace("_", "-"))
        if row is None:
            raise ConfigError(_unknown(name, sorted(BY_KEY), f"--config {path}"))
        found[row.attribute] = value
    return found


def check_together(settings: Settings) -> None:
    """Refuse settings that are each in range and cannot work together."""
    if settings.max_num_batched_tokens < settings.max_running_requests:
        raise ConfigError(
            f"--max-num-batched-tokens {settings.max_num_batched_tokens} is below --max-running-requests "
            f"{settings.max_running_requests}: every running request needs one token of each step; "
            "raise the first or lower the second"
        )
    if settings.chunked_prefill_size > settings.max_num_batched_tokens:
        raise ConfigError(
            f"--chunked-prefill-size {settings.chunked_prefill_size} is above --max-num-batched-tokens "
            f"{settings.max_num_batched_tokens}: no step could hold such a chunk; lower the first or raise the second"
        )
    _check_state_cache(settings)
    _check_quotas(settings)
    _check_order(settings)
    _check_ranks(settings)
    if settings.endpoint and not settings.endpoint.startswith(("ipc://", "tcp://")):
        raise ConfigError(f"--endpoint: {settings.endpoint!r} is not allowed; allowed: ipc://PATH or tcp://HOST:PORT")
    if settings.endpoint.startswith("tcp://") and not settings.keys and not settings.insecure:
        raise ConfigError(
            f"--endpoint {settings.endpoint}: tcp carries prompts in the clear; make keys with `bandmaster keys DIR` "
            "and pass --keys DIR, or pass --insecure"
        )
    if settings.model and not Path(settings.model).exists():
        raise ConfigError(f"model: {settings.model!r} does not exist; allowed: a directory or a GGUF file")
    if settings.chat_template and not Path(settings.chat_template).is_file():
        raise ConfigError(f"--chat-template: {settings.chat_template!r} is no file")


def _check_state_cache(settings: Settings) -> None:
    """What the cached states of recurrent layers and the page size ask of each other; nothing without the cache."""
    if not settings.enable_prefix_caching:
        return
    page = settings.page_size
    if settings.state_cache == "no_buffer" and page != 1:
        raise ConfigError(
            f"--state-cache no_buffer keeps the state of any length of a sequence, so a page must hold 1 token, and "
            f"--page-size is {page}; pass --page-size 1, or --state-cache extra_buffer"
        )
    interval = settings.checkpoint_interval
    if settings.state_cache == "extra_buffer" and interval % page:
        raise ConfigError(
            f"--checkpoint-interval {interval} is no multiple of --page-size {page}: a kept state would stand inside a "
            f"page; {next_multiple(interval, page)} is the next multiple"
        )


def _check_ranks(settings: Settings) -> None:
    """Stages have layers, and ranks elsewhere a place where they can reach the daemon and each other."""
    try:
        parse_layers(settings.pp_layers, settings.pipeline_parallel_size)
    except LayersError as error:
        raise ConfigError(str(error)) from None
    endpoint = settings.ranks_endpoint
    if endpoint and not endpoint.startswith(("ipc://", "tcp://")):
        raise ConfigError(f"--ranks-endpoint: {endpoint!r} is not allowed; allowed: ipc://PATH or tcp://HOST:PORT")
    if endpoint.startswith("tcp://") and not settings.keys and not settings.insecure:
        raise ConfigError(
            f"--ranks-endpoint {endpoint}: tcp carries tokens in the clear; make keys with `bandmaster keys DIR rank` "
            "and pass --keys DIR, or pass --insecure"
        )
    if settings.rendezvous and not re.fullmatch(r"[^\s/]+:[0-9]{1,5}", settings.rendezvous):
        raise ConfigError(
            f"--rendezvous: {settings.rendezvous!r} is not allowed; allowed: HOST:PORT on the host of rank 0.0"
        )


def _check_quotas(settings: Settings) -> None:
    """Every quota by name is a share of the arena."""
    for name, share in settings.cache_quotas.items():
        parse_value(BY_KEY["cache-quota"], share, f"--cache-quotas {name}")


def _check_order(settings: Settings) -> None:
    """What only some orders of the queue read is not set beside another."""
    policy = settings.schedule_policy
    if settings.enable_priority_preemption and policy == "fcfs":
        raise ConfigError(
            "--enable-priority-preemption: with --schedule-policy fcfs every priority is refused, so nobody ever gives "
            "way; pass another order, or leave the first out"
        )
    if settings.fair_quantum_tokens != Settings.fair_quantum_tokens and policy != "fair":
        raise ConfigError(
            f"--fair-quantum-tokens {settings.fair_quantum_tokens}: nothing reads it with --schedule-policy {policy}; "
            "pass --schedule-policy fair, or leave the first out"
        )


def _check_namespaces(settings: Settings) -> None:
    """Every quota by name is of a namespace that a request to a front end can be in."""
    for name in settings.cache_quotas:
        if name and not name.startswith(SALT):
            raise ConfigError(
                f"--cache-quotas {name}: no request is ever in a namespace of this name; that of requests with "
                f"cache_salt {name!r} is {SALT}{name}"
            )


def next_multiple(least: int, of: int) -> int:
    """The smallest multiple of `of` that is at least `least`."""
    return -(-least // of) * of


def resolve(command: str, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """`Settings` from parsed flags, an environment and the file that either of them names; raises ConfigError."""
    config = flags.get("config", environ.get(PREFIX + "CONFIG"))
    from_file = _from_file(config) if config else {}
    values: dict[str, Any] = {}
    for row in rows_for(command):
        if row.attribute in flags:
            values[row.attribute] = parse_value(row, flags[row.attribute], "flag")
        elif row.variable in environ:
            values[row.attribute] = parse_value(row, environ[row.variable], f"environment {row.variable}")
        elif row.attribute in from_file:
            values[row.attribute] = parse_value(row, from_file[row.attribute], f"file {config}")
    if "max_num_batched_tokens" in values:  # a default follows the value it must not exceed, an explicit one is checked
        budget = values["max_num_batched_tokens"]
        values.setdefault("chunked_prefill_size", min(Settings.chunked_prefill_size, budget))
        values.setdefault("max_running_requests", min(Settings.max_running_requests, budget))
    elif values.get("max_running_requests", 0) > Settings.max_num_batched_tokens:
        values["max_num_batched_tokens"] = values["max_running_requests"]
    if values.get("state_cache") == "no_buffer" and values.get("enable_prefix_caching", True):
        values.setdefault("page_size", 1)
    page = values.get("page_size", Settings.page_size)
    values.setdefault("checkpoint_interval", next_multiple(Settings.checkpoint_interval, page))
    settings = Settings(**values)
    check_together(settings)
    return settings


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """One line for each environment variable with our prefix that is no setting: a misspelt one must not be silent."""
    known = {row.variable for row in TABLE} | INTERNAL
    strange = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    return [_unknown(name, sorted(known), "environment") for name in strange]


def load(command: str, argv: list[str], about: str = "", environ: Mapping[str, str] | None = None) -> Settings:
    """Parse a command line; prints and exits 0 for `--help` and `--print-config`; raises ConfigError, never exits 2."""
    surroundings = os.environ if environ is None else environ
    parser = build_parser(command, about)
    parser.error = _raise_usage  # type: ignore[method-assign, assignment]
    flags = vars(parser.parse_args(argv))
    settings = resolve(command, flags, surroundings)
    _check_namespaces(settings)
    if flags.get("print_config"):
        print(show(command, settings))
        raise SystemExit(0)
    return settings


def _raise_usage(message: str) -> None:
    raise ConfigError(message)


def show(command: str, settings: Settings) -> str:
    """The settings in force as a TOML document that `--config` reads back; secrets are left out."""
    lines = []
    for row in rows_for(command):
        value = getattr(settings, row.attribute)
        if row.kind == "secret":
            lines.append(f"# {row.key} is {'set' if value else 'not set'}")
        elif row.kind == "pairs":
            inner = ", ".join(f"{_quoted(name)} = {_quoted(text)}" for name, text in sorted(value.items()))
            lines.append(f"{row.key} = {{{inner}}}")
        elif row.kind in ("int", "fraction", "switch"):
            lines.append(f"{row.key} = {render_value(row, value)}")
        else:
            lines.append(f"{row.key} = {_quoted(render_value(row, value))}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def to_environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process that is to run with exactly these settings, secrets included."""
    child = {name: text for name, text in environ.items() if name != PREFIX + "CONFIG"}
    child |= {row.variable: render_value(row, getattr(settings, row.attribute)) for row in TABLE}
    return child


def recorded(settings: Settings, command: str = "daemon") -> dict[str, str]:
    """A command's settings as text, for the journal's `Opened` and the log; secrets only say whether they are set."""
    return {
        row.key: ("set" if getattr(settings, row.attribute) else "")
        if row.kind == "secret"
        else render_value(row, getattr(settings, row.attribute))
        for row in rows_for(command)
    }


def document() -> str:
    """The text of docs/settings.md; `python -m daemon.config` prints it."""
    return DOCUMENT.format(settings=_markdown(), exits=exit_table())


DOCUMENT = """# Settings

Made by `python -m daemon.config > docs/settings.md` from the settings table (`daemon/settings_table.py`); a test
compares. A flag overrides the environment, that overrides the file named by `--config FILE` (TOML, keys are the flags
without dashes in front), that overrides the default. Bytes take `KiB MiB GiB TiB` (or `KB MB GB TB`), durations `ms s m
h`. `--print-config` prints what is in force, in the form of such a file. Secrets reach child processes by environment
only and appear in no log or record.

{settings}

## Exit codes

`bandmaster serve` ends with the code of the child that failed first, also when a signal follows.

{exits}
"""


def _markdown() -> str:
    lines = ["| flag | environment | default | allowed | commands | meaning |", "| - | - | - | - | - | - |"]
    for row in TABLE:
        flag = f"`{row.attribute.upper()}` (first argument)" if row.positional else f"`{row.flag}`"
        flag += "".join(f", `{name}`" for name in (*row.aliases, row.negation) if name)
        default = render_value(row, row.default)
        cells = [flag, f"`{row.variable}`", f"`{default}`" if default else "empty", _range_text(row)]
        lines.append("| " + " | ".join([*cells, ", ".join(row.commands), row.help]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(document())
