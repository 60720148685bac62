"""Machine: what a run depends on outside of the daemon, and what the daemon says of itself while it lives.

Owns what is asked, and how long that may take. Must never name the host or its users, nor fail an archive: what cannot
be had is said in its place.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import trio

from daemon.run_dir import RunDir
from daemon.versions import versions
from ipc.client import DaemonClient
from ipc.errors import DaemonLost
from tools.incident.logs import Cleaner
from tools.incident.pseudonyms import Names

ASK_WITHIN_S = 5.0
DEVICES = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader")
QUESTIONS = ("health", "status", "metrics")


def facts(run_dir: Path) -> dict[str, Any]:
    """Processors, memory, disk and devices of this machine, and the processes of the run directory's daemon."""
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(run_dir)
    return {
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "processors_usable": len(os.sched_getaffinity(0)),
        "load": list(os.getloadavg()),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "memory_limit": _limit(),
        "disk_bytes": disk.total,
        "disk_free_bytes": disk.free,
        "devices": _devices(),
        "versions": versions(),
        "daemon": _daemon(run_dir),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _limit() -> str:
    """What a container may use."""
    try:
        return Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return "none known"


def _devices() -> list[str]:
    try:
        said = subprocess.run(DEVICES, capture_output=True, text=True, timeout=ASK_WITHIN_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return said.stdout.splitlines()


def _daemon(run_dir: Path) -> dict[str, Any]:
    """The live daemon's process, if there is one."""
    pid = RunDir(run_dir).owner()
    try:
        process = psutil.Process(pid) if pid else None
        if process is None:
            return {"alive": False}
        with process.oneshot():
            return {
                "alive": True,
                "age_s": round(time.time() - process.create_time(), 1),
                "rss_bytes": process.memory_info().rss,
                "threads": process.num_threads(),
                "processor_s": round(sum(process.cpu_times()[:2]), 1),
                "children": len(process.children(recursive=True)),
            }
    except psutil.Error:
        return {"alive": False}


def asked(run_dir: Path) -> tuple[dict[str, str], str]:
    """What a live daemon answers, by question, and why there is none, if there is none."""
    there = RunDir(run_dir)
    if not there.owner():
        return {}, "no daemon runs in this directory: it said nothing of itself"
    try:
        return trio.run(_ask, there.front_endpoint), ""
    except (DaemonLost, trio.TooSlowError, OSError) as error:
        return {}, f"the daemon gave no answer within {ASK_WITHIN_S:g} s: {error}"


async def _ask(endpoint: str) -> dict[str, str]:
    """The questions, as someone who only watches."""
    answers = {}
    async with DaemonClient(endpoint, f"incident-{os.getpid()}", watches=True) as client:
        with trio.fail_after(ASK_WITHIN_S):
            while not client.connected:
                await trio.sleep(0.02)
        for question in QUESTIONS:
            answer = await client.ask(question, timeout_s=ASK_WITHIN_S)
            answers[question] = answer.body
    return answers


def put(run_dir: Path, target: Path, names: Names | None) -> list[str]:
    """Write the machine's facts and the daemon's answers into an archive; notes about what is not there."""
    (target / "machine.json").write_text(json.dumps(facts(run_dir), indent=1) + "\n")
    answers, why = asked(run_dir)
    if why:
        return [why]
    folder = target / "daemon"
    folder.mkdir()
    for question, body in answers.items():
        if question == "metrics":
            (folder / "metrics.txt").write_text(body)
        else:
            said = body if names is None else Cleaner(names).line(body) or "{}"
            (folder / f"{question}.json").write_text(said + "\n")
    return []
