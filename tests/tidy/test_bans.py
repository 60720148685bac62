"""Banned calls, each with what to use instead: what would make a pure room impure, and what hides an error."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy.source import Module, modules, text_files

PURE = ("allocator", "daemon/core")
EVERYWHERE = ("allocator", "ipc", "journal", "kernels", "daemon", "tools")

# folder -> dotted call prefix (a trailing dot bans everything below it) -> what to use instead
CALLS: dict[str, dict[str, str]] = {
    **{
        folder: {
            "time.": "take `now_ns` from the input",
            "datetime.": "take `now_ns` from the input",
            "random.": "take the seed that the input recorded",
            "np.random.": "take the seed that the input recorded",
            "os.": "take it from `CoreConfig` or the input",
            "sys.": "take it from `CoreConfig` or the input",
            "hash": "`hashlib.blake2b` over canonical bytes: `hash` differs between processes",
            "id": "a number of our own: addresses differ between processes",
            "open": "return an effect; the shell does I/O",
            "print": "return a decision record",
            "input": "take it from the input record",
            "set.pop": "sort first: set order differs between processes",
        }
        for folder in PURE
    },
    "journal": {
        "time.": "the caller passes times",
        "random.": "the caller passes identities",
        "os.urandom": "the caller passes identities",
        "uuid.": "the caller passes identities",
        "hash": "`hashlib.blake2b`",
        "print": "return text; a command prints it",
    },
    "daemon": {
        "time.time": "`daemon.clock.Clock.now_ns`",
        "time.time_ns": "`daemon.clock.Clock.now_ns`",
        "time.sleep": "`trio.sleep`, in a task that can be cancelled",
        "random.": "`daemon.clock.Clock.seed`",
        "hash": "`hashlib.blake2b`: `hash` differs between processes",
    },
    **{
        folder: {
            "eval": "parse it",
            "exec": "call it",
            "breakpoint": "nothing: remove it",
            "os.system": "`subprocess` with a list",
            "logging.getLogger": "`structlog.get_logger`",
        }
        for folder in ("ipc", "kernels", "tools")
    },
}
# A printing place and why it may: what a person or a script reads on standard output.
PRINTERS = {
    "daemon/config.py": "--print-config and --help",
    "daemon/launcher.py": "the one line that says where the server listens",
    "daemon/rank/convert.py": "the prepared directory, read by the launcher",
}
# (file, call) that is allowed against the table, and why.
EXCEPTIONS = {
    ("allocator/graph.py", "id"): "whether two references are to one object, within one call; no address gets out",
    ("daemon/clock.py", "time.time_ns"): "the one reader of the clock",
    ("daemon/faults.py", "random.Random"): "draws by the seed of a specification: the same text always strikes alike",
    ("daemon/frontend/service.py", "time.time"): "`created` of the API is the wall clock's; nothing is decided by it",
    ("daemon/run_dir.py", "time.sleep"): "waits for orphans at boot, before any event loop runs",
    ("daemon/rank/faults.py", "time.sleep"): "a late forward in the worker thread: the delay was asked for",
    ("daemon/rank/modeled.py", "time.sleep"): "the worker thread is the modeled device: its delay is the product",
    ("daemon/rank/modeled_link.py", "time.sleep"): "the worker thread tries again a peer that does not listen yet",
}


# Methods that a framework finds by their names; where one is bound to a key, a test of that room holds both together.
CALLED_BY_NAME = {"tools/top": ("on_", "action_")}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute chain; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def banned_calls(module: Module, bans: dict[str, str]) -> Iterator[str]:
    """One line for each banned call or attribute access."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
        elif isinstance(node, ast.Attribute) and dotted(node) in ("os.environ", "sys.argv"):
            name = dotted(node)
        else:
            continue
        if (module.path.as_posix(), name) in EXCEPTIONS:
            continue
        for banned, instead in bans.items():
            if name == banned or (banned.endswith(".") and name.startswith(banned)):
                yield f"{module.path}:{node.lineno}: {name}: instead {instead}"


@pytest.mark.parametrize("folder", sorted(CALLS))
def test_banned_calls(folder: str) -> None:
    """No room calls what is banned in it; the message names the replacement."""
    wrong = [line for module in modules(folder) for line in banned_calls(module, CALLS[folder])]
    assert not wrong, "\n".join(wrong)


def test_no_exception_is_stale() -> None:
    """An exception whose call is gone is gone too."""
    calls = {
        (module.path.as_posix(), dotted(node.func))
        for module in modules(*EVERYWHERE)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
    }
    stale = sorted(set(EXCEPTIONS) - calls) + sorted({(path, "print") for path in PRINTERS} - calls)
    assert not stale, f"these exceptions are no longer needed: {stale}"


def set_names(tree: ast.AST) -> set[str]:
    """Names and attributes that the module annotates or assigns as sets."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and re.match(r"(set|frozenset|Set)\b", ast.unparse(node.annotation)):
            found.add(ast.unparse(node.target).removeprefix("self."))
        if isinstance(node, ast.Assign) and is_set(node.value, set()):
            found |= {ast.unparse(target).removeprefix("self.") for target in node.targets}
    return found


def is_set(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression is visibly a set."""
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call) and dotted(node.func) in ("set", "frozenset"):
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor):
        return is_set(node.left, names) or is_set(node.right, names)
    text = dotted(node)
    return bool(text) and (text in names or text.rpartition(".")[2] in names)


def set_walks(module: Module) -> Iterator[str]:
    """One line for each place where the order of a set could reach a result."""
    names = set_names(module.tree)
    for node in ast.walk(module.tree):
        walked: list[ast.expr] = []
        if isinstance(node, ast.For | ast.comprehension):
            walked = [node.iter]
        elif isinstance(node, ast.Call) and dotted(node.func) in ("list", "tuple", "iter", "enumerate", "next"):
            walked = list(node.args[:1])
        for expression in walked:
            if is_set(expression, names):
                yield f"{module.path}:{expression.lineno}: walks a set: instead `sorted(...)` or a dict"


@pytest.mark.parametrize("folder", PURE)
def test_no_set_is_walked_in_a_pure_room(folder: str) -> None:
    """Where something is decided, nothing iterates a set: its order differs between processes."""
    wrong = [line for module in modules(folder) for line in set_walks(module)]
    assert not wrong, "\n".join(wrong)


def test_only_named_places_print() -> None:
    """Outside the commands nothing prints: logs are structured, results are returned."""
    wrong = [
        f"{module.path}:{node.lineno}: print: instead a structlog event"
        for module in modules("allocator", "ipc", "journal", "kernels", "daemon")
        if module.path.as_posix() not in PRINTERS
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and dotted(node.func) == "print"
    ]
    assert not wrong, "\n".join(wrong)


def swallowers(module: Module) -> Iterator[str]:
    """One line for each handler that catches everything and does nothing."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = "" if node.type is None else ast.unparse(node.type)
        idle = all(isinstance(entry, ast.Pass | ast.Continue) for entry in node.body)
        if node.type is None or (idle and re.search(r"\b(Base)?Exception\b", caught)):
            yield f"{module.path}:{node.lineno}: except {caught or '(everything)'}: name the error and act on it"


def test_no_error_is_swallowed() -> None:
    """No handler catches everything silently, and none is bare."""
    wrong = [line for module in modules(*EVERYWHERE) for line in swallowers(module)]
    assert not wrong, "\n".join(wrong)


def test_no_marks_of_unfinished_work() -> None:
    """What is missing is an issue or a sentence in the documents, not a mark in the source."""
    marks = re.compile("|".join(rf"\b{word}\b" for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")))
    wrong = [
        f"{path}:{number}: {line.strip()}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if marks.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_path_or_host_of_one_machine() -> None:
    """No tracked file names a home directory, a folder of one machine or a package index."""
    words = [r"(?<![\w.])/" + name + "/" for name in ("wo" + "rk", "ro" + "ot", "ho" + "me")]
    words += ["py" + r"pi\.org", "python" + r"hosted\.org"]
    pattern = re.compile("|".join(words))
    wrong = [
        f"{path}:{number}: {line.strip()[:120]}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_defined_and_never_used() -> None:
    """A function, class or method of the product whose name occurs nowhere else is dead."""
    everything = "\n".join(module.text for module in modules(*EVERYWHERE, "tests"))
    counts: dict[str, int] = {}
    for word in re.findall(r"[A-Za-z_][A-Za-z0-9_]*", everything):
        counts[word] = counts.get(word, 0) + 1
    wrong = [
        f"{module.path}:{node.lineno}: {node.name} is never used"
        for module in modules(*EVERYWHERE)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and counts[node.name] == 1
        and not node.decorator_list
        and not node.name.startswith(("__", "do_", *CALLED_BY_NAME.get(module.folder, ())))
    ]
    assert not wrong, "\n".join(wrong)


# --- the judges themselves -----------------------------------------------------------------------------------------


def judged(text: str, path: str = "allocator/example.py") -> Module:
    """A module made of a text, as the judges see it."""
    return Module(Path(path), path, text)


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("import time\nx = time.monotonic()", True),
        ("x = hash(b'')", True),
        ("import os\nx = os.environ['A']", True),
        ("def f(id): return id + 1", False),
        ("x = message.id", False),
        ("x = self.hash(1)", False),
    ],
)
def test_the_ban_judge(text: str, caught: bool) -> None:
    """Banned calls are seen, and their look-alikes are not."""
    assert bool(list(banned_calls(judged(text), CALLS["allocator"]))) is caught


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("for x in {1, 2}: f(x)", True),
        ("a = set(b)\nc = [x for x in a]", True),
        ("class A:\n    held: set[int]\n    def f(self): return list(self.held)", True),
        ("a = set(b)\nfor x in sorted(a): f(x)", False),
        ("a = {}\nfor x in a: f(x)", False),
    ],
)
def test_the_set_judge(text: str, caught: bool) -> None:
    """Iteration over a set is seen, a sorted one is allowed."""
    assert bool(list(set_walks(judged(text)))) is caught


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("try: f()\nexcept: g()", True),
        ("try: f()\nexcept Exception: pass", True),
        ("try: f()\nexcept KeyError: pass", False),
        ("try: f()\nexcept Exception as error: g(error)", False),
    ],
)
def test_the_swallow_judge(text: str, caught: bool) -> None:
    """Silent handlers are seen, narrow and acting ones are allowed."""
    assert bool(list(swallowers(judged(text)))) is caught
