"""Client streams in the open: all requests of one front end, over the connections on which they are spoken of.

Owns which streams there are, which request number is whose choice, and what is said to the daemon about them. Must
never wait. Invariants: a stream leaves the books only when the daemon said its end, or was told that nobody reads it;
what a connection brought of a choice counts only once that connection has said where the choice stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from allocator.columns import i64, pack_i64
from ipc import codec
from ipc.checks import check_generate
from ipc.client_stream import Choice, RequestStream
from ipc.errors import DecodeError
from ipc.handshake import Limits
from ipc.messages import (
    Abort,
    Accepted,
    Acknowledge,
    Continued,
    FinishAt,
    Finished,
    FromFrontEnd,
    Generate,
    Refused,
    Resume,
    TokenBatch,
)

UNKNOWN = "unknown_request"  # the daemon's code for a Resume of what it does not know
ROUNDS_MAX = 16  # how often a stream is taken up without a word about it
ACKNOWLEDGED_MAX = 1024  # ended ids that the next connection hears of again: the last one may have lost them
HOLES_MAX = 3  # how often the rest of one request is asked for because its end came too early
RESUME_REST_BYTES = 1024  # of a Resume, beside id and tokens
COUNTERS = (
    "sent_requests", "token_batches", "tokens", "stray_tokens", "aborts", "resumed", "sent_again", "given_up", "holes",
)  # fmt: skip

StreamMessage = Accepted | Refused | TokenBatch | Finished | Continued


class OpenStreams:
    """The streams of one client. `post` sends without waiting; it is None while nobody listens."""

    def __init__(self) -> None:
        self.stats: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._by_id: dict[str, RequestStream] = {}  # open ones, and those whose end is owed or must be told
        self._choices: dict[int, Choice] = {}  # by the daemon's number: those whose tokens count
        self._ended: list[str] = []  # ids to acknowledge
        self._acknowledged: deque[str] = deque(maxlen=ACKNOWLEDGED_MAX)  # newest last
        self._post: Callable[[FromFrontEnd], None] | None = None
        self._limits = Limits()
        self._takers: dict[type, Callable[[Any], None]] = {
            TokenBatch: self._tokens,
            Finished: self._finished,
            Accepted: self._accepted,
            Continued: self._continued,
            Refused: self._refused,
        }

    def __len__(self) -> int:
        """How many are not settled."""
        return len(self._by_id)

    def numbers(self) -> set[int]:
        """The request numbers whose tokens count now."""
        return set(self._choices)

    # --- connections -------------------------------------------------------------------------------------------------

    def meet(self, post: Callable[[FromFrontEnd], None], limits: Limits) -> None:
        """A daemon has welcomed us: tell it what is open here, and what nobody reads any more."""
        self._post, self._limits = post, limits
        acknowledged = [id_ for id_ in self._acknowledged if id_ not in self._by_id]
        if acknowledged:
            self._say(Acknowledge(acknowledged))
        for stream in list(self._by_id.values()):
            if stream.closed or stream.lost:
                self._dismiss(stream)
            else:
                self._take_up(stream)

    def part(self) -> None:
        """The connection is over: streams wait for the next one."""
        self._post = None
        self._choices.clear()
        for stream in self._by_id.values():
            stream.suspend()

    def give_up(self, reason: str) -> None:
        """No daemon comes back in time: every reader is told; what is left of it is aborted if one ever comes."""
        for stream in self._by_id.values():
            if stream.left and not stream.lost:
                self.stats["given_up"] += not stream.closed
                stream.lose(reason)

    def _say(self, message: FromFrontEnd) -> None:
        assert self._post is not None, "somebody listens"
        self._post(message)

    # --- from readers ------------------------------------------------------------------------------------------------

    def begin(self, stream: RequestStream) -> None:
        """Send its request; somebody listens. What the daemon could not read is refused here, and never sent."""
        if stream.id in self._by_id:
            raise ValueError(f"the request id {stream.id!r} is in use on this connection")
        refused = _refusal(stream.generate, self._limits)
        if refused is not None:
            stream.refuse(refused)
            return
        self._by_id[stream.id] = stream
        self.stats["sent_requests"] += 1
        self._say(stream.generate)

    def leave(self, stream: RequestStream) -> None:
        """The reader is gone. The daemon is told; the id stays ours until the daemon has said that it ended."""
        stream.closed = True
        for choice in stream.choices:
            self._choices.pop(choice.request, None)
        if stream.left and self._by_id.get(stream.id) is stream:
            self.abort(stream)

    def abort(self, stream: RequestStream) -> None:
        """Say Abort, now or on the next connection."""
        stream.aborted = True
        if self._post is not None:
            self.stats["aborts"] += 1
            self._say(Abort(stream.id))

    def abort_all(self) -> None:
        """The process ends: say Abort for whatever is read."""
        for stream in list(self._by_id.values()):
            if stream.left and not stream.closed:
                self.abort(stream)

    def finish_at(self, stream: RequestStream, choice: int, output_tokens: int) -> None:
        """Say FinishAt, now or once the choice was taken up."""
        stream.choices[choice].stop_at = output_tokens
        if self._post is not None and not stream.choices[choice].resuming:
            self._say(FinishAt(stream.id, choice, output_tokens))

    # --- taking up -------------------------------------------------------------------------------------------------

    def _dismiss(self, stream: RequestStream) -> None:
        """Nobody reads it: it ends over there, now, and its id is free in the same breath."""
        self._by_id.pop(stream.id, None)
        for choice in stream.choices:
            self._choices.pop(choice.request, None)
        self.stats["aborts"] += 1
        self._say(Abort(stream.id))
        self._say(Acknowledge([stream.id]))

    def _fail(self, stream: RequestStream, reason: str) -> None:
        """It cannot go on, for a reason of its own."""
        stream.lose(reason)
        self._dismiss(stream)

    def _take_up(self, stream: RequestStream) -> None:
        """On a new connection: ask for the rest of what was accepted, send the others again."""
        stream.rounds += 1
        if stream.rounds > ROUNDS_MAX:
            self._fail(stream, f"taken up {ROUNDS_MAX} times and nothing was heard of it")
        elif stream.accepted is None:
            self._send_again(stream)
        else:
            stream.sent_again = False
            self._resume_choices(stream)
        if stream.aborted and not stream.lost:
            self.abort(stream)

    def _send_again(self, stream: RequestStream) -> None:
        """The daemon may know it or not; on its acceptance the choices are taken up, so either is right."""
        self.stats["sent_again"] += 1
        stream.sent_again = True
        self._say(stream.generate)

    def _resume_choices(self, stream: RequestStream) -> None:
        room = self._limits.message_bytes_max - RESUME_REST_BYTES - len(stream.id.encode())
        for choice in stream.choices:
            if choice.ended:  # complete here; a daemon that knew nothing of the request has begun it anew
                self._say(FinishAt(stream.id, choice.index, len(choice.held)))
                continue
            choice.resuming = True
            self._choices.pop(choice.request, None)
            held = pack_i64(choice.held)
            if len(held) > room:
                self._fail(stream, f"its {len(choice.held)} output tokens are more than one message can hold")
                return
            self.stats["resumed"] += 1
            self._say(Resume(stream.id, choice.index, held))

    # --- from the daemon ---------------------------------------------------------------------------------------------

    def take(self, message: StreamMessage) -> None:
        """What the daemon says of a request; of one that is not ours any more, nothing follows."""
        self._takers[type(message)](message)

    def acknowledge(self) -> None:
        """Tell the daemon which ends were seen since the last time."""
        if self._ended:
            self._say(Acknowledge(self._ended))
            self._acknowledged.extend(self._ended)
            self._ended = []

    def _tokens(self, batch: TokenBatch) -> None:
        """One step's tokens to their streams. The hot path: one dictionary look-up and two appends per token."""
        choices = self._choices
        stray = 0
        tokens = i64(batch.tokens).tolist()
        for request, token in zip(i64(batch.requests).tolist(), tokens, strict=True):
            choice = choices.get(request)
            if choice is None:
                stray += 1
                continue
            (choice.pending or choice.event()).tokens.append(token)
            choice.held.append(token)
        for entry in batch.logprobs:
            choice = choices.get(entry.request)
            if choice is None:
                continue
            if entry.prompt_position < 0:
                choice.event().logprobs.append(entry.values)
            else:
                choice.prompt_logprobs(entry.prompt_position, entry.values)
        self.stats["token_batches"] += 1
        self.stats["tokens"] += len(tokens)
        self.stats["stray_tokens"] += stray

    def _accepted(self, message: Accepted) -> None:
        stream = self._by_id.get(message.id)
        if stream is None or (stream.accepted is not None and not stream.sent_again):
            return
        stream.accept(message)
        if stream.closed:
            return
        if not stream.sent_again:
            self._choices.update((choice.request, choice) for choice in stream.choices)
            return
        stream.sent_again = False
        self._resume_choices(stream)

    def _continued(self, message: Continued) -> None:
        stream = self._by_id.get(message.id)
        if stream is None or stream.closed or message.choice >= len(stream.choices):
            return
        choice = stream.choices[message.choice]
        if not choice.resuming or choice.ended:
            return
        difference = choice.take_up(message)
        if difference:
            self._fail(stream, f"the daemon remembers another request: {difference}")
            return
        self._choices[choice.request] = choice
        if choice.stop_at >= 0:
            self._say(FinishAt(stream.id, choice.index, choice.stop_at))

    def _finished(self, message: Finished) -> None:
        stream = self._by_id.get(message.id)
        if stream is None or message.choice >= len(stream.choices):
            return
        choice = stream.choices[message.choice]
        if choice.ended or choice.request != message.request:
            return
        if not stream.closed and message.reason != "fault":
            if choice.resuming:
                return  # it is told again behind the Continued
            if message.output_tokens > len(choice.held):
                self._fill(stream, f"{message.output_tokens} tokens were sent, {len(choice.held)} came")
                return
        self._choices.pop(choice.request, None)
        stream.finish(message)
        if not stream.left:
            del self._by_id[message.id]
            self._ended.append(message.id)

    def _fill(self, stream: RequestStream, what: str) -> None:
        """Messages were lost on the way: ask for what is missing."""
        self.stats["holes"] += 1
        stream.holes += 1
        if stream.holes > HOLES_MAX:
            self._fail(stream, f"messages of it are lost again and again; last: {what}")
        else:
            self._resume_choices(stream)

    def _refused(self, message: Refused) -> None:
        stream = self._by_id.get(message.id)
        if stream is None:
            return
        if stream.accepted is None or stream.closed:
            del self._by_id[message.id]
            stream.refuse(message)
        elif message.code == UNKNOWN:
            if not stream.sent_again:
                stream.generate = msgspec.structs.replace(
                    stream.generate,
                    sampling=msgspec.structs.replace(stream.generate.sampling, seed=stream.accepted.seed),
                )
                self._send_again(stream)
        elif stream.sent_again:
            self._fail(stream, f"the daemon does not know the request any more and refuses it: {message.message}")


def _refusal(generate: Generate, limits: Limits) -> Refused | None:
    """What the daemon's gateway would say to a request that it cannot read, said before it is sent."""
    try:
        check_generate(generate, limits)
        size = len(codec.encode(generate))
    except DecodeError as error:
        code = "prompt_too_long" if (error.field, error.code) == ("prompt", "too_long") else "bad_parameter"
        return Refused(generate.id, code, error.text, error.field)
    except (OverflowError, TypeError, UnicodeEncodeError) as error:  # an integer or a text msgpack has no form for
        return Refused(generate.id, "bad_parameter", f"the request cannot be encoded: {error}")
    if size > limits.message_bytes_max:
        text = f"the request has {size} bytes, the limit is {limits.message_bytes_max}"
        return Refused(generate.id, "bad_parameter", text, "", limits.message_bytes_max, size)
    return None
