"""Imports go only downwards: the drawn table of layers, held over the syntax trees."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tidy.source import PACKAGES, ROOT, Module, modules

TYPES = ("allocator.columns", "allocator.ops", "allocator.effects", "allocator.geometry")
CORE_TYPES = ("daemon.core.inputs", "daemon.core.outputs", "daemon.core.limits", "daemon.core.reasons")
# What a pure room may use of the standard library: nothing that reads a clock, a file, entropy or the machine.
PURE_STANDARD = frozenset(
    {"__future__", "abc", "bisect", "collections", "contextlib", "dataclasses", "enum", "functools", "hashlib"}
    | {"heapq", "itertools", "math", "operator", "struct", "types", "typing"}
)
SHELL_SHARED = (
    "daemon.config",
    "daemon.settings_table",
    "daemon.exits",
    "daemon.faults",
    "daemon.layers",
    "daemon.processes",
    "daemon.clock",
    "daemon.logs",
    "daemon.run_dir",
    "daemon.endpoints",
    "daemon.listening",
    "daemon.pulse",
)


@dataclass(frozen=True)
class Layer:
    """One row of the table: a folder, what it may import of ours (dotted prefixes) and of others."""

    folder: str
    ours: tuple[str, ...]
    others: frozenset[str]
    standard: frozenset[str] | None = None  # None: all of it


def _layer(folder: str, ours: tuple[str, ...], others: str, pure: bool = False) -> Layer:
    return Layer(folder, ours, frozenset(others.split()), PURE_STANDARD if pure else None)


# The longest matching folder decides.
TABLE = (
    _layer("allocator", ("allocator",), "numpy msgspec", pure=True),
    _layer("ipc", ("ipc", *TYPES), "msgspec zmq trio outcome zstandard"),
    _layer("journal", ("journal", "ipc.messages", *TYPES, *CORE_TYPES), "numpy msgspec google_crc32c zstandard"),
    _layer("kernels", ("kernels",), "numpy torch triton"),
    _layer("daemon/core", ("daemon.core", "allocator", "ipc.messages"), "numpy msgspec", pure=True),
    _layer(
        "daemon/rank",
        ("daemon.rank", "allocator", "ipc", "kernels", *SHELL_SHARED),
        "numpy msgspec trio torch transformers tokenizers safetensors gguf accelerate psutil structlog filelock",
    ),
    _layer(
        "daemon/frontend",
        ("daemon.frontend", "ipc", *TYPES, *SHELL_SHARED),
        "msgspec trio starlette hypercorn tokenizers jinja2 prometheus_client structlog",
    ),
    _layer(
        "daemon",
        ("daemon", "allocator", "ipc", "journal"),
        "numpy msgspec trio zmq structlog prometheus_client psutil",
    ),
    _layer(
        "tools",
        (*PACKAGES,),
        "numpy msgspec trio httpx rich textual psutil structlog torch transformers tokenizers zstandard google_crc32c",
    ),
)
FORBIDDEN_OURS = {"daemon": ("daemon.rank", "daemon.frontend")}


def layer_of(module: Module) -> Layer:
    """The row of the table that holds for this module."""
    fitting = [row for row in TABLE if module.folder == row.folder or module.folder.startswith(row.folder + "/")]
    return max(fitting, key=lambda row: len(row.folder))


def imported(tree: ast.Module, known: frozenset[str]) -> list[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands; `from a import b` is `a.b` where that is a module."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append((node.lineno, whole if whole in known else str(node.module)))
    return found


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of the prefixes or below one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def offence(module: Module, name: str) -> str:
    """Why this module must not import that name; empty if it may."""
    row, top = layer_of(module), name.partition(".")[0]
    if top in PACKAGES:
        if within(name, FORBIDDEN_OURS.get(row.folder, ())):
            return "is another process: it is started, not imported"
        return "" if within(name, row.ours) else f"is above {row.folder}/, which may import {', '.join(row.ours)}"
    if top == "tests":
        return "is a test"
    if top in sys.stdlib_module_names:
        if row.standard is not None and top not in row.standard:
            return f"has no place in {row.folder}/, which is pure"
        return "belongs to another event loop: everything runs on trio" if top == "asyncio" else ""
    return (
        ""
        if top in row.others
        else f"is no dependency of {row.folder}/, which may import {', '.join(sorted(row.others))}"
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_only_downwards(package: str) -> None:
    """No module imports what its row of the table does not list."""
    known = frozenset(module.name for module in modules())
    wrong = [
        f"{module.path}:{line}: {name} {why}"
        for module in modules(package)
        for line, name in imported(module.tree, known)
        if (why := offence(module, name))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "name", "allowed"),
    [
        ("allocator/plan.py", "numpy", True),
        ("allocator/plan.py", "time", False),
        ("allocator/plan.py", "ipc.messages", False),
        ("ipc/codec.py", "allocator.ops", True),
        ("ipc/codec.py", "allocator.logical.chain", False),
        ("journal/replay.py", "daemon.core.inputs", True),
        ("journal/replay.py", "daemon.core.scheduler", False),
        ("kernels/reference.py", "allocator.ops", False),
        ("daemon/core/state.py", "ipc.messages", True),
        ("daemon/core/state.py", "trio", False),
        ("daemon/frontend/app.py", "torch", False),
        ("daemon/engine.py", "daemon.rank.loop", False),
        ("daemon/engine.py", "torch", False),
        ("daemon/engine.py", "tools.cli", False),
        ("daemon/rank/loop.py", "torch", True),
        ("daemon/rank/loop.py", "daemon.engine", False),
    ],
)
def test_the_table_judges_as_drawn(path: str, name: str, allowed: bool) -> None:
    """The judge itself: known good and known bad imports are told apart."""
    judged = Module(Path(path), path.removesuffix(".py").replace("/", "."), "")
    assert (offence(judged, name) == "") is allowed


def test_every_package_we_import_is_a_declared_dependency() -> None:
    """What the product imports is asked for in pyproject.toml by ourselves, not by luck of someone else's needs."""
    names = {"google_crc32c": "google-crc32c", "zmq": "pyzmq", "prometheus_client": "prometheus-client"}
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[0]
    known = frozenset(module.name for module in modules())
    used = {name.partition(".")[0] for module in modules() for _, name in imported(module.tree, known)}
    missing = [
        name
        for name in sorted(used - set(sys.stdlib_module_names) - set(PACKAGES))
        if f'"{names.get(name, name)}>=' not in declared
    ]
    assert not missing, f"imported and not declared: {missing}"


def test_no_module_shadows_the_standard_library_or_a_sibling() -> None:
    """A module run as a script must not hide a standard module or one of our folders from its siblings."""
    taken = set(sys.stdlib_module_names) | set(PACKAGES)
    allowed = {"types", "queue", "platform"}  # inside a package, imported by full name only
    wrong = [
        str(module.path)
        for module in modules("tools")
        if module.path.stem in taken - allowed and module.path.stem not in ("__init__", "__main__")
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_is_reachable() -> None:
    """No dead file: each module is imported by the product, or is started as a program or a command."""
    known = frozenset(module.name for module in modules())
    used = {name for module in modules() for _, name in imported(module.tree, known)}
    used |= {parent for name in used for parent in (name.rpartition(".")[0],)}
    texts = "\n".join(module.text for module in modules())
    dead = [
        str(module.path)
        for module in modules()
        if module.name not in used
        and module.path.name not in ("__init__.py", "__main__.py")
        and f'"{module.name}"' not in texts
        and "__main__" not in module.text
        and module.folder != "tools"
    ]
    assert not dead, "nobody imports: " + ", ".join(dead)
