"""The frame: what is written is read back, and no changed byte is taken for what was written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal import frame
from journal.frame import BadFrame, Frame

PAYLOADS = st.binary(max_size=100)


@given(sequence=st.integers(1, 2**63), kind=st.integers(0, 2**16 - 1), prev=st.integers(0, 2**32 - 1), payload=PAYLOADS)
def test_round_trip(sequence: int, kind: int, prev: int, payload: bytes) -> None:
    """A frame has a multiple of 8 bytes and reads back as what was encoded."""
    data, crc = frame.encode(sequence, kind, frame.MAY_SKIP, sequence - 1, prev, payload)
    assert len(data) % 8 == 0
    found = frame.decode(data, 0)
    assert isinstance(found, Frame)
    said = (found.end, found.sequence, found.kind, found.flags, found.synced_through, found.prev_crc, found.crc)
    assert said == (len(data), sequence, kind, frame.MAY_SKIP, sequence - 1, prev, crc)
    assert found.payload == payload


@pytest.mark.parametrize("length", range(10))
def test_every_flipped_bit_is_seen(length: int) -> None:
    """No single changed bit of header, payload or padding gives a whole frame."""
    data, _ = frame.encode(7, 28, 0, 3, 99, bytes(range(length)))
    for at in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            assert isinstance(frame.decode(bytes(changed), 0), BadFrame), f"byte {at}, bit {bit}"


def test_every_cut_is_seen() -> None:
    """A frame cut at any byte is short, and says whether its header is there."""
    data, _ = frame.encode(7, 28, 0, 3, 99, b"payload")
    for length in range(len(data)):
        found = frame.decode(data[:length], 0)
        assert isinstance(found, BadFrame)
        assert found.condition == ("short_header" if length < frame.HEADER_BYTES else "short_payload")


def test_length_is_checked_before_reading() -> None:
    """A length above the limit is bad, whatever follows, and such a payload cannot be encoded."""
    data, _ = frame.encode(1, 1, 0, 0, 0, b"")
    huge = data[:4] + (frame.PAYLOAD_BYTES_MAX + 1).to_bytes(4, "little") + data[8:]
    found = frame.decode(huge, 0)
    assert isinstance(found, BadFrame)
    assert "exceeds the limit" in found.what
    with pytest.raises(ValueError, match="exceeds the journal's limit"):
        frame.encode(1, 1, 0, 0, 0, bytes(frame.PAYLOAD_BYTES_MAX + 1))


def test_lag_saturates() -> None:
    """A mark further behind than 32 bits can say is clipped, so it never claims more than is known."""
    data, _ = frame.encode(1 << 40, 1, 0, 5, 0, b"")
    found = frame.decode(data, 0)
    assert isinstance(found, Frame)
    assert 5 <= found.synced_through < 1 << 40


def test_sound_frames_are_found_behind_damage() -> None:
    """Every whole frame behind a damaged one is found again, and none inside a payload that pretends to be one."""
    inner, _ = frame.encode(500, 28, 0, 0, 0, b"inner")
    parts = [frame.encode(at, 28, 0, 0, 0, inner if at == 3 else b"x" * at)[0] for at in range(1, 6)]
    data = bytearray(b"".join(parts))
    data[len(parts[0]) + 4] ^= 0xFF  # the length of frame 2
    data[len(parts[0]) + len(parts[1]) + 20] ^= 1  # and the link of frame 3, whose payload holds a frame's image
    found = [sound.sequence for sound in frame.sound_frames(bytes(data), len(parts[0]), 2)]
    assert found == [4, 5]
