"""The documents that are made from the source: the rooms in `MAP.md`, `settings.md`, `api.md`, `exit_codes.md`.

Owns their generation. Must never invent: every line comes from a docstring or a table of the product. Invariant: what
is committed equals what is generated (`tests/tidy/test_docs.py`); `python -m tools.docs --write` brings it up to date.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from daemon.config import document as settings_page
from daemon.frontend.errors import ENDS, REFUSALS
from daemon.frontend.fields import Field, Use
from daemon.frontend.schemas import FIELDS
from tools import ends

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("allocator", "ipc", "journal", "kernels", "daemon", "daemon/core", "daemon/rank", "daemon/frontend", "tools")
BEGIN, END = "<!-- rooms: made by tools/docs.py -->", "<!-- end of rooms -->"

API_PAGE = """# HTTP interface

Made by `python -m tools.docs --write` from the tables of `daemon/frontend/`. The endpoints are those of the OpenAI API,
`/v1/models`, `/v1/completions`, `/v1/chat/completions`, and `/tokenize`, `/detokenize`, `/health`, `/health/live`,
`/health/ready`, `/metrics`, `/version`, `/flush_cache`.

## Request fields

{head}
{built}

Checked, and without effect on the output:

{head}
{ignored}

Known to clients of OpenAI, vLLM or SGLang and not built here; any value but a neutral one is answered with a 400 that
names the field, as is every field that no table has: {refused}.

## Usage and the prefix cache

`usage.prompt_tokens_details.cached_tokens` is how many prompt tokens were found in the prefix cache and not computed,
all prompts of the request together; each prompt counts once, whatever `n` is. It is in every answer in one piece and in
the last chunk of a stream with `include_usage`; with `continuous_usage_stats` the details are null until it is known.
Beside it, as an extension, `hits` has one entry per prompt, in order:

* `cached_tokens` of this prompt. The output is that of a cold run, as far as the arithmetic of other batch shapes
  allows.
* `matched_tokens`: how far the cache knew this prompt, by its full-attention pages alone.
* `hit_cut`: what ended the hit. `full`: nothing more of this prompt is known. `window:TOKENS` or `state`: the rest of
  `matched_tokens` is known, but not this part of it. null: every whole page before the last token was found (a short
  prompt has none), or no cache was asked (it is switched off, log probabilities of the prompt were wanted, or memory
  could not hold the hit beside the request).

`cache_salt` (as in vLLM) gives a request a space of its own: its prefixes are found only by requests of an equal salt,
and a request without a salt finds only those without one. [prefix_cache.md](prefix_cache.md) says how hits are found.

With `cache_store` false later requests find nothing of what this one computed; it still finds what is there. What a
request with `cache_pin_ms` leaves in the cache is given up behind everything that is not pinned, until that time is
over. How much of the arena all pins may name is `--pinned-max`; one beyond that is not made, which the log says and
the answer does not. A namespace's share of the arena is `--cache-quota`.

`deadline_ms` and `priority`: [queue.md](queue.md) says who starts when, and what is refused.

`POST /flush_cache` empties the prefix cache. 200: nothing is left in it; 409: running requests read a part, which
stays; the body says how many units of each band were freed and kept. It asks for the API key, if there is one.

## Answers that are no success

The body is `{{"error": {{"message", "type", "param", "code"}}}}`; in a stream that has begun it is the last event, and
no `[DONE]` follows.

| status | code | when |
| - | - | - |
{answers}
"""


def first_line(path: Path) -> str:
    """The first line of a module's docstring without its own name in front."""
    text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0].strip()
    name, colon, rest = text.partition(": ")
    same = name.lower().replace(" ", "_").rstrip("s") in (path.stem.rstrip("s"), path.stem)
    text = rest if colon and same else text
    return text[:1].upper() + text[1:]


def rooms() -> str:
    """Every folder with its sentence and a line for each of its modules."""
    parts = []
    for room in ROOMS:
        folder = ROOT / room
        found = [path for path in folder.rglob("*.py") if path.name != "__init__.py"]
        inner = [
            path
            for path in found
            if not any(path.is_relative_to(ROOT / other) for other in ROOMS if other != room and other.startswith(room))
        ]
        parts.append(f"### `{room}/`\n\n{first_line(folder / '__init__.py')}\n")
        lines = [
            f"* `{path.relative_to(folder).with_suffix('').as_posix()}` {first_line(path)}" for path in sorted(inner)
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def map_page() -> str:
    """`MAP.md` with its generated part renewed."""
    page = (ROOT / "MAP.md").read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{rooms()}\n{END}{after}"


def field_line(field: Field) -> str:
    """One row of the table of request fields."""
    kind = (field.kind.__doc__ or "").partition("\n")[0]
    default = "required" if field.required else "" if field.default in (None, ()) else f"`{field.default}`".lower()
    cells = [f"`{field.name}`", ", ".join(field.endpoints), kind, field.range_text(), default, field.note]
    return "| " + " | ".join(cells) + " |"


def api_page() -> str:
    """`docs/api.md`."""
    head = "| field | endpoints | type | range | default | note |\n| - | - | - | - | - | - |"
    built = [field_line(field) for field in FIELDS if field.use is Use.BUILT]
    ignored = [field_line(field) for field in FIELDS if field.use is Use.IGNORED]
    refused = sorted({f"`{field.name}`" for field in FIELDS if field.use is Use.REFUSED})
    answers = [f"| {row.status} | `{row.code}` | {name} |" for name, row in sorted({**REFUSALS, **ENDS}.items())]
    return API_PAGE.format(
        head=head,
        built="\n".join(built),
        ignored="\n".join(ignored),
        refused=", ".join(refused),
        answers="\n".join(answers),
    )


def pages() -> dict[str, str]:
    """Every generated document by its path."""
    return {
        "MAP.md": map_page(),
        "docs/settings.md": settings_page(),
        "docs/api.md": api_page(),
        "docs/exit_codes.md": ends.page(),
    }


def main(argv: list[str]) -> int:
    """Without arguments: 1 and the names of stale documents, 0 if none is; with `--write`: write them."""
    write = argv == ["--write"]
    stale = [name for name, text in pages().items() if not (ROOT / name).is_file() or (ROOT / name).read_text() != text]
    for name in stale:
        sys.stdout.write(f"{name} {'written' if write else 'is stale: python -m tools.docs --write'}\n")
        if write:
            (ROOT / name).write_text(pages()[name], encoding="utf-8")
    return int(bool(stale) and not write)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
