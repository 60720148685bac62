"""The repository's own source as data: modules with their syntax trees, tracked text files.

Owns finding and parsing. Must never import the code that it reads: a module with a broken import is still checked.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("allocator", "ipc", "journal", "kernels", "daemon", "tools")
SKIPPED = {".git", ".venv", "build", "run", "__pycache__", "bandmaster.egg-info"}


@dataclass(frozen=True)
class Module:
    """One Python file: `path` relative to the root, dotted `name`, `text` and lazily its syntax `tree`."""

    path: Path
    name: str
    text: str

    @property
    def folder(self) -> str:
        """The folder with forward slashes, for messages and tables."""
        return self.path.parent.as_posix()

    @cached_property
    def tree(self) -> ast.Module:
        """The module's syntax tree."""
        return ast.parse(self.text, filename=str(self.path))

    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method, nested ones included."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _read(path: Path) -> Module:
    relative = path.relative_to(ROOT)
    parts = relative.with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(relative, name, path.read_text(encoding="utf-8"))


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """All modules below the folders, by path; without arguments the whole product."""
    found = [path for folder in folders or PACKAGES for path in (ROOT / folder).rglob("*.py")]
    return tuple(_read(path) for path in sorted(found) if not SKIPPED & set(path.relative_to(ROOT).parts))


@cache
def text_files() -> tuple[tuple[Path, str], ...]:
    """Every text file that belongs to the repository: relative path and content."""
    suffixes = {".py", ".md", ".toml", ".lock", ".txt", ".cfg", ".svg", ""}
    found = []
    for path in sorted(ROOT.rglob("*")):
        relative = path.relative_to(ROOT)
        hidden = any(part.startswith(".") and part != ".ci" for part in relative.parts[:-1])
        if path.is_file() and path.suffix in suffixes and not hidden and not SKIPPED & set(relative.parts):
            found.append((relative, path.read_text(encoding="utf-8", errors="replace")))
    return tuple(found)
