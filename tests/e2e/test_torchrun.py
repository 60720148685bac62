"""Ranks of a real model that torchrun placed, over tcp with keys, on an address that stands for another host."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from ipc.keys import make_keys
from tests.e2e.harness import assert_replays, eventually, serving
from tests.frontend.tokenizers_made import byte_level
from tests.rank.models import Reference, tiny_model
from tests.rank.places import free_port
from tests.rank.test_parity import compare
from tools.own_server import ROOT, OwnServer

HOST = "127.0.0.2"
LENGTHS = (5, 30, 61, 90)


@contextlib.contextmanager
def torchrun(endpoint: str, keys: Path, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun with two workers that meet at `HOST`; whatever is left of them is killed at the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    command += ["--master-addr", HOST, "--master-port", str(free_port(HOST)), "--no-python"]
    command += [sys.executable, "-m", "tools.cli", "rank", "--endpoint", endpoint, "--keys", str(keys)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with output.open("wb") as log:
        started = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
    try:
        yield started
    finally:
        family = psutil.Process(started.pid).children(recursive=True) if started.poll() is None else []
        started.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        started.wait()


def rank_of(stage: int, launcher: subprocess.Popen[bytes]) -> psutil.Process:
    """The process that computes for a stage now."""
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = process.cmdline()
            if "daemon.rank" in line and line[line.index("--stage") + 1] == str(stage):
                return process
    raise AssertionError(f"no process of stage {stage}")


def ask(server: OwnServer, prompt: list[int], count: int) -> list[int]:
    """The greedy tokens of one completion."""
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=200, trust_env=False)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_stages_by_torchrun_say_what_transformers_says_over_a_kill(tmp_path: Path) -> None:
    """Keys prove the ranks; one is killed in the middle; torchrun's own store serves both epochs; all end with 0."""
    place = tiny_model(tmp_path, "llama")
    (place / "tokenizer.json").write_text(byte_level()._tokenizer.to_str())
    draw = random.Random(4)
    prompts = [[draw.randrange(3, 200) for _ in range(length)] for length in LENGTHS]
    endpoint = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    make_keys(tmp_path / "keys", ["rank", "frontend"])
    flags = ["--pp", "2", "--rank-launch", "wait", "--ranks-endpoint", endpoint, "--keys", str(tmp_path / "keys")]
    flags += ["--dtype", "float32", "--arena-bytes", "16MiB", "--invariants", "2"]
    with torchrun(endpoint, tmp_path / "keys", tmp_path / "torchrun.out") as launcher:
        with serving(tmp_path / "run", str(place), *flags) as server, ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(ask, server, prompt, 100) for prompt in prompts]
            eventually(lambda: server.metrics().get("bandmaster:generation_tokens_total", 0) > 20, "tokens are made")
            rank_of(1, launcher).kill()
            outputs = [answer.result() for answer in answers]
            assert server.metrics()["bandmaster:epoch"] == 2
            assert server.stop() == 0, server.tail()
        assert launcher.wait(60) == 0, (tmp_path / "torchrun.out").read_text()[-2000:]
    assert_replays(tmp_path / "run")
    compare(Reference(place), prompts, outputs)
