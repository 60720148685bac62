"""The documents tell the truth: names exist, generated pages are fresh, commands and flags are real."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache

import pytest

from allocator.physical.clearance import CLEARANCE, Hazard
from daemon.frontend.metrics import Metrics as FrontendMetrics
from daemon.metrics import Metrics as DaemonMetrics
from daemon.settings_table import TABLE
from tests.tidy.source import PACKAGES, ROOT, modules
from tools import docs
from tools.bench import BENCHMARKS
from tools.cli import COMMANDS

PAGES = (
    "README.md",
    "MAP.md",
    "CHANGELOG.md",
    "docs/life_of_a_request.md",
    "docs/rules.md",
    "docs/daemon.md",
    "docs/recovery.md",
    "docs/allocator.md",
    "docs/prefix_cache.md",
    "docs/queue.md",
    "docs/plan.md",
    "docs/models.md",
)


def page(name: str) -> str:
    """A document's text."""
    return (ROOT / name).read_text(encoding="utf-8")


def code_lines(name: str) -> list[str]:
    """The lines inside fenced blocks, continuation lines joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page(name), re.S | re.M)
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@cache
def members(name: str) -> dict[str, ast.AST]:
    """What a module defines at its top, by name; empty for no module."""
    found = [module for module in modules() if module.name == name]
    return inner(found[0].tree) if found else {}


def inner(node: ast.AST) -> dict[str, ast.AST]:
    """What a module or class body defines, by name."""
    names: dict[str, ast.AST] = {}
    for entry in getattr(node, "body", ()):
        if isinstance(entry, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[entry.name] = entry
        elif isinstance(entry, ast.Assign):
            names |= {target.id: entry for target in entry.targets if isinstance(target, ast.Name)}
        elif isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            names[entry.target.id] = entry
    return names


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module of ours, or something defined in one."""
    known = {module.name for module in modules()}
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        if ".".join(parts[:cut]) in known:
            here = members(".".join(parts[:cut]))
            for part in parts[cut:]:
                if part not in here:
                    return False
                here = inner(here[part])
            return True
    return False


@pytest.mark.parametrize("name", PAGES)
def test_every_dotted_name_in_a_document_exists(name: str) -> None:
    """`package.module.thing` in backticks is found in the source, through classes down to methods and fields."""
    pattern = rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`"
    wrong = [found for found in re.findall(pattern, page(name)) if not exists(found)]
    assert not wrong, f"{name} names what does not exist: {wrong}"


def test_the_judge_of_names() -> None:
    """Real names are found, invented ones are not."""
    assert exists("daemon.core.scheduler.SchedulerCore.feed")
    assert exists("ipc.messages.Step.seq")
    assert exists("daemon.core.order")
    assert not exists("daemon.core.scheduler.SchedulerCore.run")
    assert not exists("daemon.core.nothing")


def test_the_life_of_a_request_walks_through_every_process() -> None:
    """It names functions of front end, gateway, engine, core, chains, journal, rank and results."""
    text = page("docs/life_of_a_request.md")
    processes = ("daemon.frontend", "daemon.gateway", "daemon.engine", "daemon.results", "daemon.rank")
    rooms = (*processes, "daemon.core", "allocator.logical", "allocator.physical", "journal", "ipc")
    missing = [room for room in rooms if f"`{room}." not in text]
    assert not missing


def test_generated_documents_are_fresh() -> None:
    """`python -m tools.docs --write` would change nothing; so MAP.md names every module."""
    stale = [name for name, text in docs.pages().items() if page(name) != text]
    assert not stale, f"run python -m tools.docs --write: {stale}"


@pytest.mark.parametrize("name", PAGES)
def test_paths_in_a_document_exist(name: str) -> None:
    """Files and folders of the repository that a document names in backticks or links are there."""
    text = page(name)
    named = re.findall(rf"`((?:{'|'.join(PACKAGES)}|docs|tests|\.ci)/[\w./-]*)`", text)
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [path for path in named if not (ROOT / path).exists()]
    missing += [link for link in links if not ((ROOT / name).parent / link).exists()]
    assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize("name", PAGES)
def test_commands_in_a_document_are_real(name: str) -> None:
    """Each `bandmaster X` and `make X` in a fenced block is a subcommand or a target; each bench has its module."""
    targets = set(re.findall(r"^([a-z]+):", page("Makefile"), re.M))
    for line in code_lines(name):
        words = line.split("#")[0].split()
        if words[:1] == ["make"]:
            assert [word for word in words[1:] if word in targets], f"{name}: {line}"
        if words[:1] == ["bandmaster"]:
            assert words[1] in COMMANDS, f"{name}: {line}"
            if words[1] == "bench":
                assert words[2] in BENCHMARKS, f"{name}: {line}"


@pytest.mark.parametrize("name", PAGES)
def test_metrics_in_a_document_are_real(name: str) -> None:
    """Each `bandmaster:NAME` in backticks is a metric of the daemon or of a front end."""
    known = {
        family.name
        for registry in (DaemonMetrics().registry, FrontendMetrics().registry)
        for family in registry.collect()
    }
    wrong = [found for found in re.findall(r"`(bandmaster:\w+)", page(name)) if found not in known]
    assert not wrong, f"{name}: {wrong}"


@pytest.mark.parametrize("name", ["README.md"])
def test_server_flags_in_a_document_are_real(name: str) -> None:
    """Each flag behind `serve` in a fenced block is in the settings table."""
    known = (
        {row.flag for row in TABLE} | {alias for row in TABLE for alias in row.aliases} | {"--print-config", "--config"}
    )
    for line in code_lines(name):
        if re.match(r"(bandmaster|make) serve", line):
            wrong = [flag for flag in re.findall(r"--[\w-]+", line) if flag not in known]
            assert not wrong, f"{name}: {line}"


def test_every_command_has_its_module() -> None:
    """Each subcommand and each benchmark names a module of ours that has `main`."""
    entries = [command.module for command in COMMANDS.values()] + [module for module, _ in BENCHMARKS.values()]
    missing = [name for name in entries if "main" not in members(name)]
    assert not missing


def test_the_clearance_table_is_that_of_the_code() -> None:
    """docs/allocator.md has one row per consumer and one column per hazard, with what the code does about it."""
    rows = re.findall(r"^\| ([A-Z_]+) \| (.*) \|$", page("docs/allocator.md"), re.M)
    written = {consumer: cells.split(" | ") for consumer, cells in rows}
    coded = {consumer.name: [row[hazard].name for hazard in Hazard] for consumer, row in CLEARANCE.items()}
    assert written == coded
    header = " | ".join(hazard.name for hazard in Hazard)
    assert f"| consumer | {header} |" in page("docs/allocator.md")


def test_the_changelog_knows_this_version() -> None:
    """The newest heading is the version of pyproject.toml."""
    version = tomllib.loads(page("pyproject.toml"))["project"]["version"]
    first = re.search(r"^## (\S+)", page("CHANGELOG.md"), re.M)
    assert first is not None
    assert first[1] == version


def test_every_page_has_one_title() -> None:
    """One H1 per document, on its first line."""
    for name in (*PAGES, "docs/api.md", "docs/settings.md", "docs/journal_format.md"):
        text = re.sub(r"^```.*?^```", "", page(name), flags=re.S | re.M)
        assert re.findall(r"^# ", text, re.M) == ["# "], name
        assert text.startswith("# "), name
