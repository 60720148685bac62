"""Pseudonyms: what stands for names and tokens in an archive that others may read.

Owns the keyed functions. Must never keep the key beyond its process, nor write it anywhere: without it nothing can be
turned back, and a guess cannot be checked. Invariants: equal names have equal pseudonyms and unequal ones unequal;
token sequences keep exactly what a prefix cache sees of them: two of them are equal as far as their originals are, and
not a token further, but by chance and where an id stands that ends requests; for the second scheme see `Tokens`.

A token is permuted among the vocabulary by a permutation that is drawn anew for each sequence of tokens in front of it
(a Feistel network whose rounds keyed BLAKE2b draws), so what two prompts have in common behind the place where they
parted is lost. Ids that end requests have drawn ids that are nobody else's, the same everywhere; end-of-text ids stay,
and so do ids outside of the vocabulary: requests are refused for them, and the decision names the id.
"""

from __future__ import annotations

import math
import platform
import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from daemon.core.tree_paths import _known_from
from daemon.core.visits import GHOST_TOKENS, MARK_TOKENS

NAME_CHARS_MAX = 256  # longer names are refused by the core, with their length
DIGITS = 16  # hexadecimal digits of a pseudonym
NUMBER_DIGITS = 8  # and of one of a number behind it
KEY_BYTES = 32
UNKNOWN_VOCABULARY = 1 << 31  # where no epoch says how many tokens there are
WORD = (1 << 32) - 1
_ROUNDS = struct.Struct("<12I")  # six rounds of a Feistel network, a factor and a summand each
CHUNK_TOKENS = 64
CHUNKS_MAX = 16_384
SEED_MAX = (1 << 63) - 1
DRAWS_MAX = 64  # of images of stop ids, until none is its own
_NUMBERED = re.compile(r"(.*)-(\d{1,6})", re.DOTALL)
NAMESPACE_KIND = "salt:"  # of the front end's own making; every other text in front of a colon may be a user's
_STOPPED = re.compile(r"stop token (-?\d+)")
_ADDRESSES = (
    re.compile(r"\b[a-z][a-z0-9+]{1,9}://[^\s'\",;)]+"),
    re.compile(
        r"\[[0-9a-fA-F:.%]*:[0-9a-fA-F:.%]*\](?::\d+)?|(?<![\w:])(?:[0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{0,4}(?![\w:])"
    ),
    re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.]*\w)"),
    re.compile(r"(?<![\w.:/-])[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?:\d{2,5}(?![\d:])"),
)
_FOLDERS = re.compile(r"(?<![\w.])(?:/[^\s/:;,'\"()]+)+/(?=[^\s/])")


class Tip(NamedTuple):
    """The end of a token sequence: what the permutation of the next token is drawn from, and how many there are.

    `root` is the key that the sequence began with, `chain` the one that all of its tokens lead to: `key` but for places
    at which the second scheme forgets what came before.
    """

    key: bytes
    position: int
    root: bytes
    chain: bytes


class Names:
    """Pseudonyms of ids, front ends, namespaces and seeds."""

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
        self._key = key

    def keyed(self, purpose: str, data: bytes, size: int = 16) -> bytes:
        """`size` bytes that stand for `data`, apart for each purpose."""
        return blake2b(data, digest_size=size, key=self._key, person=purpose.encode()).digest()

    def id(self, text: str) -> str:
        """A request's id. Ids of one call, which differ in the number at their end, begin alike: see `call`."""
        numbered = _NUMBERED.fullmatch(text)
        if numbered and numbered[1]:
            return self._name("id", numbered[1], len(text), f"-{self._hex('id number', text)[:NUMBER_DIGITS]}")
        return self.call(text)

    def call(self, text: str) -> str:
        """The id of a whole HTTP call: what the ids of its prompts begin with."""
        return self._name("id", text, len(text))

    def frontend(self, text: str) -> str:
        """A front end's name."""
        return self._name("front", text, len(text))

    def namespace(self, text: str) -> str:
        """A cache namespace; empty stays empty, and it stays to be seen that one is of a salt."""
        kind = NAMESPACE_KIND if text.startswith(NAMESPACE_KIND) else ""
        return kind + self._name("ns", text, len(text))

    def seed(self, seed: int) -> int:
        """A seed that is none of the original's tokens; one that is refused for its size stays."""
        if not -(1 << 63) <= seed <= SEED_MAX:
            return seed
        return int.from_bytes(self.keyed("seed", seed.to_bytes(8, "little", signed=True), 8), "little") & SEED_MAX

    def digest(self, digest: bytes) -> bytes:
        """What stands for the digest of something that is not there; none for none."""
        return self.keyed("digest", digest) if digest else b""

    def _name(self, kind: str, text: str, characters: int, tail: str = "") -> str:
        if not text:
            return text
        name = f"{kind}-{self._hex(kind, text)}{tail}"
        return name.ljust(characters, ".") if characters > NAME_CHARS_MAX else name

    def _hex(self, purpose: str, text: str) -> str:
        return self.keyed(purpose, text.encode(errors="surrogatepass"), DIGITS // 2).hex()


def without_places(text: str) -> str:
    """A text of our own without what tells where: addresses, this host's name, and folders, which people name.

    An address is a URL, numbers of an IP address, or anything that a colon and a port stand behind.
    """
    text = _FOLDERS.sub(".../", text)
    for pattern in _ADDRESSES:
        text = pattern.sub("(address)", text)
    host = platform.node()
    return re.sub(rf"(?<!\w){re.escape(host)}(?!\w)", "(host)", text) if len(host) > 1 else text


class _Range:
    """Ids [`low`, `high`), and permutations of them that take `special` ids to `images` and the rest to the rest.

    Only the rest is permuted here; both are sorted, and as many within the range.
    """

    def __init__(self, low: int, high: int, special: Sequence[int], images: Sequence[int]) -> None:
        self.low, self.high = low, high
        self._special = [id for id in special if low <= id < high]
        images = [id for id in images if low <= id < high]
        assert len(images) == len(self._special), f"{len(images)} images of {len(self._special)} ids"
        self._in_front = [id - low - at for at, id in enumerate(images)]  # by image, how many of the rest are below it
        self._count = high - low - len(images)
        self._rows = math.isqrt(max(self._count - 1, 0)) + 1
        self._columns = -(-self._count // self._rows) if self._count else 1

    def permuted(self, rounds: Sequence[int], id: int) -> int:
        """Another id of the range for this one, by the drawn `rounds` of a Feistel network.

        Its places are `rows` times `columns`; those beyond the range are walked over.
        """
        rows, columns, special = self._rows, self._columns, self._special
        a, b, c, d, e, f, g, h, i, j, k, m = rounds
        at = id - self.low - (bisect_left(special, id) if special else 0)
        while True:
            left, right = divmod(at, columns)
            left = (left + ((right * a + b & WORD) >> 16)) % rows
            right = (right + ((left * c + d & WORD) >> 16)) % columns
            left = (left + ((right * e + f & WORD) >> 16)) % rows
            right = (right + ((left * g + h & WORD) >> 16)) % columns
            left = (left + ((right * i + j & WORD) >> 16)) % rows
            right = (right + ((left * k + m & WORD) >> 16)) % columns
            at = left * columns + right
            if at < self._count:
                return self.low + at + (bisect_right(self._in_front, at) if special else 0)


class Tokens:
    """Pseudonyms of token sequences.

    `vocabularies` are the sizes that epochs had, `eos_ids` those of their models, `stop_ids` what requests end at.
    `page_sizes`: those of the lives, for the second scheme. The cache knows an evicted path by its tokens right before
    a mark, so these begin anew: they stay equal as far as they were from their beginning on, whatever stands in front
    of them. Empty: the first scheme.
    """

    def __init__(
        self,
        names: Names,
        vocabularies: Iterable[int] = (),
        eos_ids: Iterable[int] = (),
        stop_ids: Iterable[int] = (),
        page_sizes: Iterable[int] = (),
    ) -> None:
        self._names = names
        bounds = [0, *sorted({size for size in vocabularies if size > 0} or {UNKNOWN_VOCABULARY})]
        eos = set(eos_ids)
        special = sorted({id for id in {*stop_ids, *eos} if 0 <= id < bounds[-1]})
        self._bounds = bounds
        fixed = [id for id in special if id in eos]
        self._special = {id: id for id in fixed}
        self.unmoved = 0  # stop ids for which nothing else could be drawn
        for low, high in pairwise(bounds):
            self._special |= self._drawn(low, high, fixed, [id for id in special if low <= id < high and id not in eos])
        images = sorted(self._special.values())
        self._ranges = [_Range(low, high, special, images) for low, high in pairwise(bounds)]
        self._page_sizes = sorted(set(page_sizes))
        self._chunks: dict[tuple[Tip, bytes], tuple[bytes, Tip]] = {}

    def _drawn(self, low: int, high: int, fixed: list[int], ids: list[int]) -> dict[int, int]:
        """Ids of a range that stand for stop ids: any of it but the fixed ones, none for itself, if it can be."""
        others = _Range(low, high, fixed, fixed)
        drawn: dict[int, int] = {}
        for again in range(DRAWS_MAX if ids else 0):
            purpose = b"%d.%d" % (low, again)
            rounds = _ROUNDS.unpack(self._names.keyed("stop ids", purpose, _ROUNDS.size))
            drawn = {id: others.permuted(rounds, id) for id in ids}
            if all(id != image for id, image in drawn.items()):
                break
        self.unmoved += sum(id == image for id, image in drawn.items())
        return drawn

    def _begins(self, position: int) -> set[int]:
        """Where the tokens begin, for each size of pages, by which a path is known at the next mark."""
        mark = position // MARK_TOKENS * MARK_TOKENS + MARK_TOKENS
        if position < mark - GHOST_TOKENS:
            return {mark}
        return {_known_from(mark, size) for size in self._page_sizes}

    def root(self, namespace: str, what: bytes = b"") -> Tip:
        """The beginning of all sequences of a namespace; with `what` of a sequence of its own."""
        key = self._names.keyed("root", namespace.encode(errors="surrogatepass") + b"\0" + what)
        return Tip(key, 0, key, key)

    def stop_id(self, id: int) -> int:
        """An id that ends a request."""
        return self._special.get(id, id)

    def stop_ids(self, column: bytes) -> bytes:
        """A column of them (int64)."""
        if len(column) % 8:
            return bytes(len(column))
        return np.array([self.stop_id(id) for id in np.frombuffer(column, np.int64).tolist()], np.int64).tobytes()

    def detail(self, text: str) -> str:
        """Why a choice ended, in words; some name the id, or a file."""
        return _STOPPED.sub(lambda found: f"stop token {self.stop_id(int(found[1]))}", without_places(text))

    def one(self, tip: Tip, token: int) -> tuple[int, Tip]:
        """The next token of a sequence, and the sequence's new end."""
        mapped, tip = self._more(tip, (token,))
        return mapped[0], tip

    def column(self, tip: Tip, column: bytes) -> tuple[bytes, Tip]:
        """More tokens of a sequence (an int64 column), and its new end; no whole number of tokens becomes zeros."""
        if len(column) % 8:
            return bytes(len(column)), tip
        parts = []
        for at in range(0, len(column), 8 * CHUNK_TOKENS):
            part, tip = self._chunk(tip, column[at : at + 8 * CHUNK_TOKENS])
            parts.append(part)
        return b"".join(parts), tip

    def _chunk(self, tip: Tip, column: bytes) -> tuple[bytes, Tip]:
        """A short column; what many prompts begin with is worked out once."""
        known = self._chunks.get((tip, column))
        if known is None:
            mapped, end = self._more(tip, np.frombuffer(column, np.int64).tolist())
            if len(self._chunks) >= CHUNKS_MAX:
                del self._chunks[next(iter(self._chunks))]
            known = self._chunks[tip, column] = np.array(mapped, np.int64).tobytes(), end
        return known

    def _more(self, tip: Tip, tokens: Sequence[int]) -> tuple[list[int], Tip]:
        """More tokens of a sequence, and its new end.

        Of each end's key a hash gives the permutation of the next token and, apart from it, what the next key comes of.
        """
        key, position, root, chain = tip
        special, bounds, ranges, sizes = self._special, self._bounds, self._ranges, self._page_sizes
        mapped = []
        for token in tokens:
            drawn = blake2b(key, digest_size=64).digest()
            if token in special:
                mapped.append(special[token])
            elif 0 <= token < bounds[-1]:
                range_ = ranges[bisect_right(bounds, token) - 1] if len(ranges) > 1 else ranges[0]
                mapped.append(range_.permuted(_ROUNDS.unpack_from(drawn, 16), token))
            else:
                mapped.append(token)
            position += 1
            before, key = key, _behind(drawn, token)
            if not sizes:
                chain = key
                continue
            chain = key if before == chain else _behind(blake2b(chain, digest_size=64).digest(), token)
            begins = self._begins(position)
            if position in begins:
                key = self._names.keyed("anew", root + position.to_bytes(8, "little"))
            elif position < min(begins):
                key = chain
        return mapped, Tip(key, position, root, chain)


def _behind(drawn: bytes, token: int) -> bytes:
    """The key behind one more token."""
    return blake2b(drawn[:16] + token.to_bytes(8, "little", signed=True), digest_size=16).digest()
