"""`bandmaster parity`: our greedy output beside that of `transformers`, token for token.

Four ways: a server and the embedded model over HTTP (here), `--family` the model matrix on the engine in one process
(`parity_families`), `--toy` random schedules over the toy model (`parity_toy`), `--held` bytes held over bytes needed
(`parity_held`).

Owns the command line and the first way. Thirty prompts go over HTTP to a server with float32 arithmetic, each alone and
then many at once; `transformers` generates from the same token ids with the same weights. Must never hide a difference:
where the reference's own two best logits lie closer than `--tie`, a difference is listed as a flip, and what follows it
is judged against the reference given our tokens; any other difference is an error (exit code 1).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.table import Table

from tools.http_load import Load, Result, stream_one
from tools.own_server import ROOT, OwnServer, ServerFailed
from tools.parity_judge import TIE, Judgement, judge
from tools.parity_prompts import CASES, Case
from tools.reference import Reference
from tools.tables import print_table

TOKENIZER_FILE = "tokenizer.json"


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


def show(rows: list[dict[str, Any]], layout: str) -> None:
    """The rows for a person."""
    title = f"greedy output beside transformers, float32, {layout}"
    table = Table("prompt", "tokens", "sent", "output", "verdict", title=title)
    for row in rows:
        note = row["why"] or "; ".join(
            f"token {flip['position']}, margin {flip['margin']:.1e}" for flip in row["flips"]
        )
        verdict = f"{row['verdict']} ({note})" if note else row["verdict"]
        table.add_row(row["prompt"], str(row["prompt_tokens"]), row["sent"], str(row["output_tokens"]), verdict)
    print_table(Console(), table)


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
    made.add_argument("--tp", type=int, default=1, help="tensor ranks of each stage, of the own server or --family [1]")
    made.add_argument("--pp", type=int, default=1, help="pipeline stages, likewise [1]")
    ways = made.add_argument_group("other ways, without a server")
    ways.add_argument("--family", default="", metavar="NAMES|all", help="the model matrix of families, or of all")
    ways.add_argument("--slice", action="store_true", help="with --family: one engine and few prompts of each")
    ways.add_argument("--toy", action="store_true", help="random schedules over the toy model")
    ways.add_argument("--schedules", type=int, default=1000, help="with --toy: how many [1000]")
    ways.add_argument("--seed", type=int, default=0, help="with --toy: the first schedule's seed [0]")
    ways.add_argument("--jobs", type=int, default=1, help="with --toy and --family: processes [1]")
    ways.add_argument("--schedule", default="", metavar="FILE", help="with --toy: run this one schedule again")
    ways.add_argument("--held", action="store_true", help="bytes that a request holds over bytes it needs")
    ways.add_argument("--config", action="append", default=[], help="with --held: a config.json, may be repeated")
    return made


def main(argv: list[str]) -> int:
    """0 when every output is equal up to listed flips, 1 otherwise."""
    options = parser().parse_args(argv)
    if options.schedules < 1 or options.jobs < 1:
        parser().error(f"--schedules {options.schedules} and --jobs {options.jobs} must be at least 1")
    if min(options.tp, options.pp) < 1 or (
        max(options.tp, options.pp) > 1 and (options.toy or options.held or options.url)
    ):
        parser().error(f"--tp {options.tp} --pp {options.pp}: at least 1, for the own server and for --family only")
    asked = {"toy": options.toy, "families": bool(options.family), "held": options.held, "": bool(options.url)}
    ways = [way for way, wanted in asked.items() if wanted] or [""]
    if len(ways) > 1:
        parser().error("--toy, --family, --held and --url are four ways; ask for one")
    way = ways[0]
    if way:
        return int(importlib.import_module(f"tools.parity_{way}").main(options))
    return _over_http(options)


def _over_http(options: argparse.Namespace) -> int:
    step = len(CASES) / max(1, min(options.prompts, len(CASES)))
    cases = [CASES[int(index * step)] for index in range(max(1, min(options.prompts, len(CASES))))]
    try:
        directory = prepared(options.model)
        with contextlib.ExitStack() as stack:
            layout = ["--tp", str(options.tp), "--pp", str(options.pp)]
            server = OwnServer([str(directory), "--dtype", "float32", *layout, *options.serve_flag])
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
        sys.stdout.write(json.dumps({"tp": options.tp, "pp": options.pp, **counts, "rows": rows}) + "\n")
    else:
        show(rows, f"tp {options.tp} pp {options.pp}")
        sys.stdout.write(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + "\n")
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
