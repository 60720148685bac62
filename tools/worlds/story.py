"""Stories: what an input led to, in lines that a person reads and a file can hold.

Owns the words. Must never show anything that differs between two runs of the same inputs. Requests go by the names
that their clients gave them; times are milliseconds since the world began.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from daemon.core import inputs
from daemon.core.outputs import Decided, Outputs
from ipc.messages import Finished, Refused, Step
from tools.worlds.world import START_NS, World


def told(world: World, item: inputs.Input, out: Outputs, steps: bool = False) -> Iterator[str]:
    """One line per decision, and, where `steps` are wanted, one per step."""
    messages = [reply.message for reply in out.replies]
    refused = iter([message for message in messages if isinstance(message, Refused)])
    ended = {message.request: message for message in messages if isinstance(message, Finished)}
    at = f"{(item.now_ns - START_NS) / 1_000_000:g}"
    for one in out.decisions:
        who = next(refused).id if one.verdict == "refused" else name_of(world, one.request)
        detail = ended[one.request].detail if one.verdict == "ended" and one.request in ended else ""
        yield f"{at} {' '.join(_words(world, one, who, detail))}"
    if steps and out.step is not None:
        which = f" of micro-batch {out.step.microbatch}" if world.stages > 1 else ""
        yield f"{at} step {out.step.seq}{which}: {'; '.join(_parts(world, out.step))}"


def name_of(world: World, number: int) -> str:
    """The client's name of a request, with its choice where there are several; empty for 0."""
    if not number:
        return ""
    known = world.by_request.get(number)
    if known is None:
        return f"#{number}"
    client, choice = known
    return client.generate.id if client.accepted.n == 1 else f"{client.generate.id}/{choice}"


def _words(world: World, one: Decided, who: str, detail: str) -> Iterator[str]:
    yield one.verdict
    if who:
        yield who
    if one.by:
        yield f"for {name_of(world, one.by)}"
    if one.reason:
        yield f"({one.reason}{': ' if detail else ''}{detail})"
    for key, value in one.numbers.items():
        yield f"{key}={_band(world, value) if key == 'band' else value}"


def _band(world: World, band: int) -> str:
    memory = world.core._state.memory
    return memory.chain.bands[band].name if memory is not None else str(band)


def _parts(world: World, step: Step) -> Iterator[str]:
    """What a step runs: its decode rows together, then every chunk with its extent."""
    forward = step.forward
    if forward is None:
        yield "no forward"
        return
    rows = np.frombuffer(forward.rows, "<i4").tolist()
    chunks = {row for row, _, _ in world.core._state.flights[-1].chunks}
    starts, counts = np.frombuffer(forward.starts, "<i4").tolist(), np.frombuffer(forward.counts, "<i4").tolist()
    names = [name_of(world, int(world.core._state.rows.request[row])) for row in rows]
    decoding = [name for name, row in zip(names, rows, strict=True) if row not in chunks]
    if decoding:
        yield f"decode {' '.join(decoding)}"
    for name, row, start, count in zip(names, rows, starts, counts, strict=True):
        if row in chunks:
            yield f"prefill {name} {start}..{start + count}"
