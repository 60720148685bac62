"""Ordered heap: entries by a unique key, with removal from anywhere and a lazy walk in order.

Owns the binary heap and the place of each entry in it. Must never depend on what its items are. Invariants: a key is in
it once; the order of a walk is that of the keys and of nothing else, whatever was added and removed before; adding and
removing cost O(log n), the walk's next step O(log k) after k.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

Key = tuple[int, ...]
Item = TypeVar("Item")


class OrderedHeap(Generic[Item]):
    """A priority queue of items under keys (tuples of integers of one length), smallest first."""

    __slots__ = ("_items", "_keys", "_place")

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._items: dict[Key, Item] = {}
        self._place: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._items

    def add(self, key: Key, item: Item) -> None:
        """Put an item under a key that is not in use."""
        assert key not in self._items, "a key is used once"
        self._items[key] = item
        self._keys.append(key)
        self._rise(len(self._keys) - 1, key)

    def remove(self, key: Key) -> Item:
        """Take an item out, wherever it stands; its key must be there."""
        keys, at = self._keys, self._place.pop(key)
        assert keys[at] == key, "a key stands where its place says"
        item, last = self._items.pop(key), keys.pop()
        if at < len(keys):
            if at and last < keys[(at - 1) >> 1]:
                self._rise(at, last)
            else:
                self._sink(at, last)
        return item

    def first(self) -> Item:
        """The item of the smallest key; there must be one."""
        return self._items[self._keys[0]]

    def first_key(self) -> Key:
        """The smallest key; there must be one."""
        return self._keys[0]

    def walk(self) -> Iterator[Item]:
        """Items in order. Nothing may be added or removed until the walk is given up."""
        keys, items = self._keys, self._items
        border = [(keys[0], 0)] if keys else []
        while border:
            key, at = heapq.heappop(border)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(keys):
                    heapq.heappush(border, (keys[child], child))
            yield items[key]

    def _rise(self, at: int, key: Key) -> None:
        keys, place = self._keys, self._place
        while at:
            parent = (at - 1) >> 1
            above = keys[parent]
            if above < key:
                break
            keys[at] = above
            place[above] = at
            at = parent
        keys[at] = key
        place[key] = at

    def _sink(self, at: int, key: Key) -> None:
        keys, place, count = self._keys, self._place, len(self._keys)
        while (child := 2 * at + 1) < count:
            if child + 1 < count and keys[child + 1] < keys[child]:
                child += 1
            below = keys[child]
            if key < below:
                break
            keys[at] = below
            place[below] = at
            at = child
        keys[at] = key
        place[key] = at
