"""The process `python -m daemon.frontend`: it listens without a daemon, says so, and its exit codes are honest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import trio

from daemon.exits import Exit
from tests.frontend.tokenizers_made import TEMPLATE, byte_level


@pytest.fixture
def model(tmp_path) -> Path:
    """A model directory with the tokenizer's files only."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(byte_level()._tokenizer.to_str())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def start(run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    """The process, its log lines on stderr."""
    command = [sys.executable, "-m", "daemon.frontend", "--run-dir", str(run_dir), "--port", "0", *arguments]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BANDMASTER_")}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_without_a_daemon_it_is_red_and_stops_when_told(tmp_path, model, number):
    """Health is 503 with the reason, a request is a 503, and either signal ends the process with 0 and no file left."""
    url_file = tmp_path / "run" / "frontend.url"
    process = start(tmp_path / "run", str(model))
    try:
        with trio.fail_after(30):
            while not url_file.exists() and process.poll() is None:
                await trio.sleep(0.05)
        async with httpx.AsyncClient(base_url=url_file.read_text().strip()) as client:
            health = await client.get("/health")
            refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert (health.status_code, health.json()["status"], refused.status_code) == (503, "down", 503)
        assert (health.json()["why"] != "", refused.json()["error"]["code"]) == (True, "not_ready")
        process.send_signal(number)
        assert await trio.to_thread.run_sync(process.wait, 20) == Exit.CLEAN
        assert not url_file.exists()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.e2e
def test_a_model_or_setting_it_cannot_use_is_named(tmp_path, model):
    """A directory without tokenizer.json, and a bad setting, end it with their codes and a text that names them."""
    for arguments, code, text in (
        ((str(tmp_path),), Exit.MODEL, "tokenizer.json is missing"),
        ((str(model), "--log-level", "loud"), Exit.USAGE, "--log-level"),
        ((), Exit.USAGE, "no directory with a tokenizer.json"),
    ):
        process = start(tmp_path / "run", *arguments)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, text in errors) == (code, True), errors
