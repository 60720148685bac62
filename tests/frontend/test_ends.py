"""How requests end: refusals, ends without success, a lost daemon; never anything that looks like success (A2, A3)."""

from __future__ import annotations

import json

import pytest
import trio

from daemon.core.reasons import EndReason, RefusalCode
from daemon.frontend.errors import ENDS, REFUSALS, SUCCESSES
from ipc.client_stream import Tokens
from ipc.errors import DaemonLost
from tests.frontend.double import accepted, events_of, finished, http_client, make_service, refused, says
from tests.frontend.tokenizers_made import byte_level

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
FIELDS = {"prompt": "hello", "max_tokens": 5}


def test_every_code_of_the_daemon_has_its_row():
    """The tables are complete, and no unsuccessful end is among the successes."""
    assert set(REFUSALS) == {code.value for code in RefusalCode}
    assert set(ENDS) | set(SUCCESSES) == {reason.value for reason in EndReason} | {"lost"}
    assert not set(ENDS) & set(SUCCESSES)
    assert len({row.code for row in ENDS.values()}) == len(ENDS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", sorted(REFUSALS))
async def test_refusals_are_plain_answers(code, stream):
    """A refused request gets the table's status and code, streamed or not, and the field at fault."""

    async def script(fake):
        yield refused(fake.message, code, "no", field="stop_ids", limit=128, value=200, retry_after_ms=2500)

    service, _ = make_service(script)
    async with http_client(service) as client:
        response = await client.post(TEXT, json={**FIELDS, "stream": stream})
    row, error = REFUSALS[code], response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == row
    assert error["param"] == "stop_token_ids"
    assert error["message"] == "no (limit 128, got 200)"
    assert response.headers.get("retry-after") == ("3" if row.status in (429, 503) else None)


async def test_one_refused_prompt_ends_them_all():
    """Of several prompts one is refused: the answer is the refusal, and the accepted ones are aborted."""

    async def script(fake):
        if fake.prompt == [8]:
            await trio.lowlevel.checkpoint()
            yield refused(fake.message, "queue_full", "full")
            return
        yield accepted(fake.message)
        await trio.sleep_forever()

    service, daemon = make_service(script)
    async with http_client(service) as client:
        response = await client.post(TEXT, json={"prompt": [[7], [8], [9]], "stream": True})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert [stream.aborts for stream in daemon.streams] == [1, 1, 1]


def ending(reason):
    """A script that says a little and then ends with `reason`; "lost" loses the daemon, "cut" ends without an end."""

    async def script(fake):
        yield accepted(fake.message)
        yield Tokens(0, [70, 71])
        if reason == "lost":
            raise DaemonLost("its process ended")
        yield finished(fake.message, reason, 2, detail="by operator")

    return script


@pytest.mark.parametrize("reason", sorted(ENDS))
async def test_unsuccessful_ends_are_errors_and_tell_each_other_apart(reason):
    """In one piece: the table's status and code; in a stream: one error event with that code and no end mark."""
    row = ENDS[reason]
    service, _ = make_service(ending(reason))
    async with http_client(service) as client:
        whole = await client.post(TEXT, json=FIELDS)
        streamed = await client.post(TEXT, json={**FIELDS, "stream": True, "stream_options": {"include_usage": True}})
    assert (whole.status_code, whole.json()["error"]["code"]) == (row.status, row.code)
    *parts, last = events_of(streamed.text)
    assert last.startswith("error: ")
    error = json.loads(last.removeprefix("error: "))["error"]
    assert (error["code"], error["type"], error["param"]) == (row.code, row.type, None)
    assert ("by operator" in error["message"]) == (reason != "lost")
    assert "[DONE]" not in streamed.text
    assert all(json.loads(part)["choices"][0]["finish_reason"] is None for part in parts)


@pytest.mark.parametrize("reason", SUCCESSES)
async def test_successful_ends_carry_their_reason_and_the_end_mark(reason):
    """stop and length, and nothing else, end with a finish reason and the end mark."""
    service, _ = make_service(ending(reason))
    async with http_client(service) as client:
        streamed = await client.post(TEXT, json={**FIELDS, "stream": True})
    *_, last, done = events_of(streamed.text)
    assert (json.loads(last)["choices"][0]["finish_reason"], done) == (reason, "[DONE]")


@pytest.mark.parametrize("reason", ["abort", "fault", "length", "stop"])
async def test_an_end_after_the_stop_string_is_still_a_stop(reason):
    """Once the stop string was shown to end the text, what the daemon does later does not change the answer."""

    async def script(fake):
        yield accepted(fake.message)
        yield Tokens(0, byte_level().encode("xyz", False))
        await fake.told.wait()
        yield Tokens(0, [5, 6, 7])
        yield finished(fake.message, reason, 5)

    service, daemon = make_service(script)
    async with http_client(service) as client:
        body = (await client.post(TEXT, json={**FIELDS, "stop": "z"})).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("xy", "stop")
    assert body["usage"]["completion_tokens"] == daemon.streams[0].finish_asked[0][1]


async def test_an_incomplete_character_at_the_end_is_flushed():
    """The text that was held back reaches the client when the output ends in mid-character or mid-stop-string."""
    service, _ = make_service(says("ends with sto", "length", per_event=2))
    async with http_client(service) as client:
        body = (await client.post(TEXT, json={"prompt": "x", "stop": "stop", "max_tokens": 50})).json()
    assert body["choices"][0]["text"] == "ends with sto"
    lead = next(k for k, piece in enumerate(service.tokenizer.pieces.visible) if piece == "é".encode()[:1])

    async def script(fake):
        yield accepted(fake.message)
        yield Tokens(0, [lead])
        yield finished(fake.message, "length", 1)

    service, _ = make_service(script)
    async with http_client(service) as client:
        body = (await client.post(TEXT, json=FIELDS)).json()
    assert body["choices"][0]["text"] == "\ufffd"


async def test_not_ready_draining_and_lost_daemons_are_503():
    """Before the daemon is there, after it went, and while this process stops: refused with a hint when to retry."""
    service, daemon = make_service(says("x"))
    welcome, daemon.welcome, daemon.lost_reason = daemon.welcome, None, "booting"
    codes = []
    async with http_client(service) as client:

        async def ask():
            response = await client.post(TEXT, json=FIELDS)
            codes.append((response.status_code, response.json()["error"]["code"], response.headers["retry-after"]))

        await ask()
        daemon.welcome = welcome
        assert (await client.post(TEXT, json=FIELDS)).status_code == 200
        daemon.welcome = None
        await ask()
        daemon.welcome, daemon.connected = welcome, False
        await ask()
        assert daemon.waits
        service.drain()
        assert not daemon.waits, "who stops does not wait for a daemon that is gone"
        await ask()
    assert codes == [(503, code, "1") for code in ("not_ready", "daemon_lost", "daemon_lost", "draining")]


async def test_a_bug_of_ours_is_a_500_in_the_apis_shape_and_aborts():
    """An unexpected failure is logged, answered in the error shape, and gives the request back."""

    async def script(fake):
        yield accepted(fake.message)
        raise RuntimeError("unexpected")

    service, daemon = make_service(script)
    async with http_client(service) as client:
        response = await client.post(TEXT, json=FIELDS)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "bug")
    assert daemon.streams[0].aborts == 1
