"""The front end's process: `python -m daemon.frontend --run-dir DIR MODEL`.

Owns start and end of the process. Must never import a tensor library. Exits 0 when told to stop, 2 for a refused
setting, 8 for a model whose tokenizer cannot be used.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

from daemon.config import ConfigError, load
from daemon.endpoints import front_client
from daemon.exits import DaemonError, Exit
from daemon.frontend.app import build_app
from daemon.frontend.chat_template import ChatTemplate, find_template
from daemon.frontend.pieces import UnsupportedTokenizer
from daemon.frontend.server import serve_http, watch_signals
from daemon.frontend.service import Service
from daemon.frontend.tokenizer import Tokenizer, load_tokenizer
from daemon.listening import LISTEN_VARIABLE, PULSE_VARIABLE, handed_on, listen, url_of
from daemon.logs import open_log
from daemon.processes import die_with_parent
from daemon.pulse import send_back
from daemon.run_dir import RunDir, default_path
from daemon.settings_table import Settings
from ipc.client import DaemonClient

ABOUT = "HTTP front end of a running daemon, for one model directory."
CLOSE_GRACE_S = 5.0  # beyond the drain timeout, for the last bytes


def load_model(settings: Settings) -> tuple[Tokenizer, ChatTemplate | None]:
    """Tokenizer and chat template; raises DaemonError naming what is wrong with the model's files."""
    if not settings.model or not Path(settings.model).is_dir():
        text = f"model: {settings.model!r} is no directory with a tokenizer.json; `bandmaster serve` prepares one"
        raise DaemonError(Exit.USAGE, text)
    directory = Path(settings.model)
    try:
        tokenizer = load_tokenizer(directory)
        source = find_template(directory, tokenizer, settings.chat_template)
        return tokenizer, ChatTemplate(source, tokenizer) if source else None
    except (UnsupportedTokenizer, OSError, ValueError) as error:
        raise DaemonError(Exit.MODEL, f"the tokenizer of {directory} cannot be used: {error}") from error


def publish(path: Path, url: str) -> None:
    """Write where we listen, whole or not at all; under a launcher that is its own affair."""
    draft = path.with_suffix(".draft")
    draft.write_text(url + "\n")
    draft.replace(path)


async def run(settings: Settings, tokenizer: Tokenizer, template: ChatTemplate | None, log: Any) -> None:
    """Serve until told to stop."""
    paths = RunDir(default_path(settings))
    paths.prepare()
    name = f"frontend-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    given, pulse = handed_on(LISTEN_VARIABLE), handed_on(PULSE_VARIABLE)
    bound = given or listen(settings.host, settings.port)
    endpoint, keys, insecure = front_client(settings, paths)
    client = DaemonClient(
        endpoint,
        name,
        keys=keys,
        insecure=insecure,
        lost_after_s=settings.frontend_timeout_s,
        return_within_s=settings.daemon_return_s,
        log=log,
    )
    service = Service(
        client,
        tokenizer,
        template,
        served_name=settings.served_model_name,
        api_keys=tuple(key for key in settings.api_key.split(",") if key),
        body_limit_bytes=settings.request_size_limit_bytes,
        sse_keepalive_s=settings.sse_keepalive_s,
        log=log,
    )
    url_file = paths.path / "frontend.url"
    with trio.CancelScope() as scope:
        async with client, trio.open_nursery() as nursery:
            await nursery.start(watch_signals, service, scope, settings.drain_timeout_s + CLOSE_GRACE_S)
            log.info("Listening", url=url_of(bound), frontend=name, run_dir=str(paths.path))
            if pulse is not None:
                nursery.start_soon(send_back, pulse)
            if given is None:
                publish(url_file, url_of(bound))
            try:
                await serve_http(build_app(service), service, bound, CLOSE_GRACE_S)
            finally:
                if given is None:
                    url_file.unlink(missing_ok=True)
            nursery.cancel_scope.cancel()
    if scope.cancelled_caught:
        log.warning("StoppedWithOpenRequests", open_requests=service.open_requests)


def main(argv: Sequence[str] | None = None) -> int:
    """The process; returns its exit code."""
    die_with_parent()
    faulthandler.enable()  # a loop that hangs is ended by SIGABRT, and its stacks are told
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the loop takes both signals over
    try:
        settings = load("frontend", list(sys.argv[1:] if argv is None else argv), ABOUT)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.code
    log, writer = open_log(settings.log_format, settings.log_level, None, process="frontend", pid=os.getpid())
    try:
        trio.run(run, settings, *load_model(settings), log)
    except DaemonError as error:
        log.error("FrontEndCannotStart", text=str(error), exit_code=int(error.code))
        return error.code
    except KeyboardInterrupt:
        log.info("StoppedAtStart")
    finally:
        writer.close()
    return Exit.CLEAN


if __name__ == "__main__":
    sys.exit(main())
