"""The front end's process: `python -m daemon.frontend --run-dir DIR MODEL`.

Owns start and end of the process. Must never import a tensor library. Exits 0 when told to stop, 2 for a refused
setting, 8 for a model whose tokenizer cannot be used.
"""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path
from typing import Any

import trio

from daemon.config import ConfigError, load
from daemon.exits import DaemonError, Exit
from daemon.frontend.app import build_app
from daemon.frontend.chat_template import ChatTemplate, find_template
from daemon.frontend.pieces import UnsupportedTokenizer
from daemon.frontend.server import listen, serve_http, url_of, watch_signals
from daemon.frontend.service import Service
from daemon.frontend.tokenizer import load_tokenizer
from daemon.logs import open_log
from daemon.processes import die_with_parent
from daemon.run_dir import RunDir, default_path
from daemon.settings_table import Settings
from ipc.client import DaemonClient

ABOUT = "HTTP front end of a running daemon, for one model directory."
CLOSE_GRACE_S = 5.0  # beyond the drain timeout, for the last bytes


def build_service(settings: Settings, client: DaemonClient, log: Any) -> Service:
    """The service of these settings; raises DaemonError naming what is wrong with the model's tokenizer files."""
    if not settings.model or not Path(settings.model).is_dir():
        text = f"model: {settings.model!r} is no directory with a tokenizer.json; `bandmaster serve` prepares one"
        raise DaemonError(Exit.USAGE, text)
    directory = Path(settings.model)
    try:
        tokenizer = load_tokenizer(directory)
        source = find_template(directory, tokenizer, settings.chat_template)
        template = ChatTemplate(source, tokenizer) if source else None
    except (UnsupportedTokenizer, OSError, ValueError) as error:
        raise DaemonError(Exit.MODEL, f"the tokenizer of {directory} cannot be used: {error}") from error
    keys = tuple(key for key in settings.api_key.split(",") if key)
    return Service(
        client,
        tokenizer,
        template,
        served_name=settings.served_model_name,
        api_keys=keys,
        body_limit_bytes=settings.request_size_limit_bytes,
        log=log,
    )


async def run(settings: Settings, log: Any) -> None:
    """Serve until told to stop."""
    paths = RunDir(default_path(settings))
    name = f"frontend-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    bound = listen(settings.host, settings.port)
    client = DaemonClient(paths.front_endpoint, name, lost_after_s=settings.frontend_timeout_s, log=log)
    grace_s = settings.drain_timeout_s + CLOSE_GRACE_S
    with trio.CancelScope() as scope:
        async with client, trio.open_nursery() as nursery:
            service = build_service(settings, client, log)
            await nursery.start(watch_signals, service, scope, grace_s)
            log.info("Listening", url=url_of(bound), frontend=name, run_dir=str(paths.path))
            (paths.path / "frontend.url").write_text(url_of(bound) + "\n")
            await serve_http(build_app(service), service, bound, CLOSE_GRACE_S)
            nursery.cancel_scope.cancel()


def main() -> int:
    """The process; returns its exit code."""
    die_with_parent()
    try:
        settings = load("frontend", sys.argv[1:], ABOUT)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.code
    log, writer = open_log(settings.log_format, settings.log_level, None, process="frontend", pid=os.getpid())
    try:
        trio.run(run, settings, log)
    except DaemonError as error:
        log.error("FrontEndCannotStart", text=str(error), exit_code=int(error.code))
        return error.code
    finally:
        writer.close()
    return Exit.CLEAN


if __name__ == "__main__":
    sys.exit(main())
