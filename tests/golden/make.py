"""Makes the golden journal of the present format, and `schema.lock`.

    python -m tests.golden.make            write schema.lock and the journal of the present version anew

Run it when the core decides otherwise on purpose, or its state has other fields (`DECISION_VERSION` rises then), or
when a field was added at the end of a record (`SCHEMA_VERSION` rises when a release is out). Journals of earlier
versions are never made again: they show that old journals can still be read.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
from msgspec import inspect

from journal.records import PAYLOADS, SCHEMA_VERSION
from journal.storage import LOCK_NAME, DiskStorage
from journal.writer import JournalSettings
from tests.journal.world import World

HERE = Path(__file__).parent
SCHEMA_LOCK = HERE / "schema.lock"
PRESENT = HERE / f"v{SCHEMA_VERSION}"


def make_journal(directory: Path) -> None:
    """Two lives, the first killed within a record, over several segments, all but the last compressed."""
    storage = DiskStorage(directory)
    settings = JournalSettings(segment_bytes=16 << 10)
    world = World(storage, 21, "golden one", settings)
    for _ in range(24):
        world.iterate()
    storage.unlock()
    last = sorted(directory.glob("*.kvj"))[-1]
    with last.open("r+b") as file:
        file.truncate(last.stat().st_size - 5)
    world = World(storage, 22, "golden two", settings)
    for _ in range(24):
        world.iterate()
    world.close()
    world.writer.compress_finished()
    (directory / LOCK_NAME).unlink()


def schema_text() -> str:
    """Every record kind with its number and payload, then every struct: its fields in order, types and defaults."""
    lines = [f"schema {SCHEMA_VERSION}", ""]
    lines += [f"kind {kind.value} {kind.name} {payload.__name__}" for kind, payload in PAYLOADS.items()]
    structs = {struct for payload in PAYLOADS.values() for struct in structs_of(payload)}
    for struct in sorted(structs, key=lambda held: held.__name__):
        info = inspect.type_info(struct)
        assert isinstance(info, inspect.StructType)
        shape = "array" if info.array_like else "map"
        tag = f" tag {info.tag!r}" if info.tag is not None else ""
        lines += ["", f"struct {struct.__name__} {shape}{tag}"]
        lines += [f"  {field.name}: {_type(field.type)}{_default(field)}" for field in info.fields]
    return "\n".join(lines) + "\n"


def structs_of(payload: type) -> list[type]:
    """A struct and all structs that its fields lead to."""
    seen: dict[type, None] = {}
    _collect(inspect.type_info(payload), seen)
    return list(seen)


def _collect(info: inspect.Type, seen: dict[type, None]) -> None:
    """All structs that a type leads to."""
    if isinstance(info, inspect.StructType):
        if info.cls in seen:
            return
        seen[info.cls] = None
        for field in info.fields:
            _collect(field.type, seen)
    elif isinstance(info, inspect.UnionType):
        for option in info.types:
            _collect(option, seen)
    elif isinstance(info, inspect.CollectionType):
        _collect(info.item_type, seen)


def _type(info: inspect.Type) -> str:
    """A type in one word or a few."""
    if isinstance(info, inspect.StructType):
        return str(info.cls.__name__)
    if isinstance(info, inspect.UnionType):
        return " | ".join(_type(option) for option in info.types)
    if isinstance(info, inspect.CollectionType):
        return f"list[{_type(info.item_type)}]"
    if isinstance(info, inspect.DictType):
        return f"dict[{_type(info.key_type)}, {_type(info.value_type)}]"
    if isinstance(info, inspect.LiteralType):
        return f"literal{list(info.values)}"
    return type(info).__name__.removesuffix("Type").lower()


def _default(field: inspect.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f" = {field.default_factory()!r}"
    return "" if field.default is msgspec.NODEFAULT else f" = {field.default!r}"


def main() -> None:
    """Write both."""
    SCHEMA_LOCK.write_text(schema_text())
    if PRESENT.exists():
        shutil.rmtree(PRESENT)
    make_journal(PRESENT)


if __name__ == "__main__":
    main()
