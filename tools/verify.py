"""verify: checks a journal's checksums, links and segment digests, and changes nothing.

    bandmaster verify DIR [--json]

Reads every segment and lists everything of the recovery table that it meets, with what is sound on both sides. Exit
codes: `tools.ends`. Bytes that an earlier opening cut off and kept beside (`.cut`) are named, not checked.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from journal.opening import CUT_SUFFIX
from journal.reader import Walk
from journal.records import Kind
from journal.recovery import Decision
from tools.ends import DAMAGED, DONE, ended
from tools.journal_files import ReadingProgress, open_directory, refuse_foreign
from tools.output import tell
from tools.reading_flags import add_directory, add_json, reading_parser
from tools.tables import print_table


def verify(directory: str) -> dict[str, Any]:
    """Plain values: `sound`, `records`, `kinds`, `first_sequence`, `last_sequence`, `findings`, `cut`."""
    storage = open_directory(directory)
    walk = Walk(storage, tolerant=True)
    kinds: Counter[str] = Counter()
    first = 0
    with ReadingProgress(storage, "verifying") as seen:
        for record in walk.records():
            first = first or record.sequence
            kinds[Kind(record.kind).name.lower()] += 1
            seen(record)
    refuse_foreign(walk)
    findings = [
        {
            "rule": found.row.label,
            "decision": found.row.decision.value,
            "file": found.file,
            "offset": found.offset,
            "sequence": found.sequence,
            "text": found.row.text,
            "what": found.what,
        }
        for found in walk.findings
    ]
    return {
        "directory": str(storage.directory),
        "sound": all(found.row.decision is not Decision.REFUSE for found in walk.findings),
        "records": sum(kinds.values()),
        "kinds": dict(sorted(kinds.items())),
        "first_sequence": first,
        "last_sequence": walk.at.sequence,
        "synced_through": walk.at.synced_through,
        "closed": walk.at.closed,
        "findings": findings,
        "cut": sorted(name for name in storage.names() if name.endswith(CUT_SUFFIX)),
    }


def _show(result: dict[str, Any]) -> None:
    console = Console()
    if result["findings"]:
        table = Table("decision", "rule", "file", "offset", "sequence")
        table.add_column("what", overflow="fold")
        for found in result["findings"]:
            what = f"{found['text']} ({found['what']})"
            columns = (found["decision"], found["rule"], found["file"], str(found["offset"]), str(found["sequence"]))
            table.add_row(*columns, what)
        print_table(console, table)
    for name in result["cut"]:
        console.print(f"kept beside: {name}, bytes that an opening cut off a torn tail", soft_wrap=True)
    ended = "closed in order" if result["closed"] else "not closed: still written, or cut off"
    console.print(
        f"{'sound' if result['sound'] else 'DAMAGED'}: {result['records']} records, sequence "
        f"{result['first_sequence']} to {result['last_sequence']}, {ended}; {result['directory']}",
        soft_wrap=True,
    )


def main(argv: list[str] | None = None) -> int:
    """`bandmaster verify`."""
    parser = reading_parser("verify", "Check a journal's checksums and links.")
    add_directory(parser)
    add_json(parser)
    options = parser.parse_args(argv)

    def run() -> int:
        result = verify(options.directory)
        tell(options.json, lambda: result, lambda: _show(result))
        return DONE if result["sound"] else DAMAGED

    return ended("verify", run)


if __name__ == "__main__":
    raise SystemExit(main())
