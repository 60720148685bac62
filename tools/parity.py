"""`bandmaster parity`: our greedy output beside that of `transformers`, token for token.

Owns the comparison. Thirty prompts go over HTTP to a server with float32 arithmetic, each alone and then many at once;
`transformers` generates from the same token ids with the same weights. Must never hide a difference: where the
reference's own two best logits lie closer than `--tie`, a difference is listed as a flip, and what follows it is judged
against the reference given our tokens; any other difference is an error (exit code 1).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.table import Table

from tools.http_load import Load, Result, stream_one
from tools.own_server import ROOT, OwnServer, ServerFailed
from tools.parity_prompts import CASES, Case
from tools.reference import Reference

TIE = 1e-4
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Judgement:
    """What the comparison of one output says: `equal`, `flip` (ties only) or `different`; `notes` are the ties."""

    verdict: str
    notes: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""


def trimmed(tokens: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
    """An output without its end token, which one side may report and the other may not."""
    return list(tokens[:-1] if tokens and tokens[-1] in eos_ids else tokens)


def judge(
    reference: Reference,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
    tie: float,
    *,
    limit: int,
    finish_reason: str,
) -> Judgement:
    """Compare one output with the reference's; `limit` tokens were asked for, and ours ended by `finish_reason`."""
    if trimmed(ours, reference.eos_ids) == trimmed(theirs, reference.eos_ids):
        return Judgement("equal")
    if not ours:
        return Judgement("different", why="no output")
    notes: list[dict[str, Any]] = []
    for position, margin in enumerate(reference.margins(prompt, ours)):
        if margin > tie:
            expected = theirs[position] if position < len(theirs) else None
            why = f"output token {position}: {ours[position]}, {margin:.6f} below the best logit (reference {expected})"
            return Judgement("different", notes, why)
        if margin > 0:
            notes.append({"position": position, "token": ours[position], "margin": margin})
    if not notes and len(ours) != len(theirs):
        return Judgement("different", why=f"{len(ours)} output tokens, the reference has {len(theirs)}")
    if len(ours) < limit and ours[-1] not in reference.eos_ids:
        ends = [reference.margins(prompt, [*ours, eos])[-1] for eos in reference.eos_ids]
        if finish_reason != "stop" or min(ends, default=tie + 1) > tie:
            why = f"{len(ours)} of {limit} output tokens, ended by {finish_reason or 'nothing'} where no end token ties"
            return Judgement("different", notes, why)
    return Judgement("flip", notes)


async def ask_all(load: Load, prompts: Sequence[Sequence[int]], concurrency: int) -> list[Result]:
    """The outputs of all prompts, at most `concurrency` at once, in order."""
    results = [Result(index) for index in range(len(prompts))]
    queue = iter(results)
    async with load.client(concurrency) as client, trio.open_nursery() as nursery:

        async def work() -> None:
            for result in queue:
                body = load.body(0) | {"prompt": list(prompts[result.index]), "ignore_eos": False}
                await stream_one(client, body, result, trio.current_time)

        for _ in range(concurrency):
            nursery.start_soon(work)
    return results


def tokenized(directory: Path, cases: Sequence[Case]) -> list[list[int]]:
    """Token ids of the cases' texts, cut to their lengths; special tokens in the text are recognised, none is added."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_FILE))
    prompts = []
    for case in cases:
        ids = tokenizer.encode(case.text, add_special_tokens=False).ids
        assert len(ids) >= max(case.tokens, 1), f"{case.name}: only {len(ids)} tokens, {case.tokens} wanted"
        prompts.append(ids[: case.tokens] if case.tokens else ids)
    return prompts


def prepared(model: str) -> Path:
    """The model's directory, converted when it is a GGUF file or the embedded model; raises ServerFailed."""
    command = [sys.executable, "-m", "daemon.rank.convert", *([model] if model else [])]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ServerFailed(f"the model {model or '(embedded)'} could not be prepared")
    return Path(done.stdout.strip().splitlines()[-1])


def compare(load: Load, directory: Path, cases: Sequence[Case], together: int, tie: float) -> list[dict[str, Any]]:
    """One row per prompt and way of sending it."""
    prompts = tokenized(directory, cases)
    answers = {
        "alone": trio.run(ask_all, load, prompts, 1),
        f"{together} at once": trio.run(ask_all, load, prompts, together),
    }
    reference = Reference(directory)
    reference.choose_threads(prompts[0])
    rows = []
    for index, (case, prompt) in enumerate(zip(cases, prompts, strict=True)):
        theirs = reference.generate(prompt, load.output_tokens)
        for way, results in answers.items():
            result = results[index]
            if result.error:
                judged = Judgement("different", why=result.error)
            else:
                judged = judge(
                    reference,
                    prompt,
                    result.token_ids,
                    theirs,
                    tie,
                    limit=load.output_tokens,
                    finish_reason=result.finish_reason,
                )
            rows.append(
                {
                    "prompt": case.name,
                    "prompt_tokens": len(prompt),
                    "sent": way,
                    "output_tokens": len(result.token_ids),
                    "verdict": judged.verdict,
                    "flips": judged.notes,
                    "why": judged.why,
                }
            )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The rows for a person."""
    table = Table("prompt", "tokens", "sent", "output", "verdict", title="greedy output beside transformers, float32")
    for row in rows:
        note = row["why"] or "; ".join(
            f"token {flip['position']}, margin {flip['margin']:.1e}" for flip in row["flips"]
        )
        verdict = f"{row['verdict']} ({note})" if note else row["verdict"]
        table.add_row(row["prompt"], str(row["prompt_tokens"]), row["sent"], str(row["output_tokens"]), verdict)
    Console().print(table)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="bandmaster parity", description=(__doc__ or "").splitlines()[0])
    made.add_argument("model", nargs="?", default="", help="directory or GGUF file; default: the embedded model")
    made.add_argument("--url", default="", help="a running server with float32 arithmetic and this model")
    made.add_argument("--output-tokens", type=int, default=32, help="output tokens of each prompt [32]")
    made.add_argument("--together", type=int, default=16, help="requests at once in the second pass [16]")
    made.add_argument(
        "--prompts", type=int, default=len(CASES), help=f"use only so many, spread over all [{len(CASES)}]"
    )
    made.add_argument("--tie", type=float, default=TIE, help=f"logits closer than this are a tie [{TIE:g}]")
    made.add_argument("--serve-flag", action="append", default=[], help="a flag of the own server, may be repeated")
    made.add_argument("--json", action="store_true", help="one object: counts by verdict, and a list `rows`")
    return made


def main(argv: list[str]) -> int:
    """0 when every output is equal up to listed flips, 1 otherwise."""
    options = parser().parse_args(argv)
    step = len(CASES) / max(1, min(options.prompts, len(CASES)))
    cases = [CASES[int(index * step)] for index in range(max(1, min(options.prompts, len(CASES))))]
    try:
        directory = prepared(options.model)
        with contextlib.ExitStack() as stack:
            server = OwnServer([str(directory), "--dtype", "float32", *options.serve_flag])
            if not options.url:
                stack.enter_context(server)
            server.url = options.url.rstrip("/") or server.url
            load = Load(server.url, server.model(), output_tokens=options.output_tokens)
            rows = compare(load, directory, cases, options.together, options.tie)
    except ServerFailed as error:
        sys.stderr.write(f"bandmaster parity: {error}\n")
        return 1
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("equal", "flip", "different")}
    if options.json:
        sys.stdout.write(json.dumps({**counts, "rows": rows}) + "\n")
    else:
        show(rows)
        sys.stdout.write(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + "\n")
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
