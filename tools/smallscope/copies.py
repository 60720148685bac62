"""Fast copies of small chains: the whole object graph under a chain, one copier per type, found once.

Owns what may be shared between copies (what nothing changes) and what must be copied. Must never guess: a kind of value
it does not know, or a function that closes over something that can change, raises. Invariant: an operation on a copy
changes nothing that is reachable from the original. Arrays that share memory share it in the copy too.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import msgspec
import numpy as np

from allocator.capacity import CapacityForm
from allocator.checks import Checks
from allocator.physical.relief import ReliefCounts

Memo = dict[int, Any]
Copier = Callable[[Any, Memo], Any]

_COPIERS: dict[type, Copier] = {}


def clone(value: Any) -> Any:
    """A copy of `value` that shares nothing that can change."""
    return _clone(value, {})


def fields_of(kind: type) -> tuple[str, ...]:
    """Names of the slots of a class and its bases, in order of definition."""
    names: list[str] = []
    for base in reversed(kind.__mro__):
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot.startswith("__") and not slot.endswith("__"):
                names.append(f"_{base.__name__.lstrip('_')}{slot}")
            elif slot not in ("__dict__", "__weakref__"):
                names.append(slot)
    return tuple(names)


def _clone(value: Any, memo: Memo) -> Any:
    kind = type(value)
    copier = _COPIERS.get(kind)
    if copier is None:
        copier = _COPIERS[kind] = _learn(kind)
        if copier is _same:
            _SHARED.add(kind)
    return copier(value, memo)


def _same(value: Any, memo: Memo) -> Any:
    return value


def _array(value: np.ndarray, memo: Memo) -> np.ndarray:
    known = memo.get(id(value))
    if known is not None:
        return known
    base = value.base
    if base is None:
        out = value.copy()
    elif isinstance(base, np.ndarray):
        whole = _array(base, memo)
        offset = value.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        out = np.ndarray(value.shape, value.dtype, whole, offset, value.strides)
    else:
        assert not value.flags.writeable, "a view of something that is no array must be read-only"
        out = value
    memo[id(value)] = out
    return out


def _list(value: list[Any], memo: Memo) -> list[Any]:
    known = memo.get(id(value))
    if known is None:
        known = memo[id(value)] = []
        known.extend([_clone(item, memo) for item in value])
    return known


def _tuple(value: tuple[Any, ...], memo: Memo) -> tuple[Any, ...]:
    items = [_clone(item, memo) for item in value]
    for old, new in zip(value, items, strict=True):
        if old is not new:
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _dict(value: dict[Any, Any], memo: Memo) -> dict[Any, Any]:
    known = memo.get(id(value))
    if known is None:
        known = memo[id(value)] = {}
        for key, item in value.items():
            known[key] = _clone(item, memo)
    return known


def _deque(value: deque[Any], memo: Memo) -> deque[Any]:
    known = memo.get(id(value))
    if known is None:
        known = memo[id(value)] = deque((_clone(item, memo) for item in value), value.maxlen)
    return known


def _flat(value: Any, memo: Memo) -> Any:
    """Containers whose members never change: sets and byte arrays."""
    known = memo.get(id(value))
    if known is None:
        known = memo[id(value)] = value.copy()
    return known


def _method(value: MethodType, memo: Memo) -> MethodType:
    return MethodType(value.__func__, _clone(value.__self__, memo))


def _function(value: FunctionType, memo: Memo) -> FunctionType:
    for cell in value.__closure__ or ():
        if _clone(cell.cell_contents, memo) is not cell.cell_contents:
            raise TypeError(f"{value.__qualname__} closes over something that can change; it cannot be copied")
    return value


def _object(kind: type) -> Copier:
    """The copier of instances of a plain class, with slots or with a dictionary."""
    slots = fields_of(kind)
    new: Callable[[type], Any] = object.__new__

    def copy(value: Any, memo: Memo) -> Any:
        known = memo.get(id(value))
        if known is not None:
            return known
        out = memo[id(value)] = new(kind)
        for name in slots:
            field = getattr(value, name, _MISSING)
            if field is not _MISSING:
                setattr(out, name, field if type(field) in _SHARED else _clone(field, memo))
        attributes = getattr(value, "__dict__", None)
        if attributes:
            target = out.__dict__
            target.update(attributes)
            for name, field in attributes.items():
                if type(field) not in _SHARED:
                    target[name] = _clone(field, memo)
        return out

    return copy


_MISSING = object()

# Values of these types are shared. A capacity form never changes once built; what reliefs counted decides nothing.
_SHARED: set[type] = {int, float, bool, str, bytes, type(None), frozenset, range, type, BuiltinFunctionType, np.bool_}
_SHARED |= {np.dtype, Checks, CapacityForm, ReliefCounts}
_COPIERS.update(dict.fromkeys(_SHARED, _same))
_COPIERS.update({np.ndarray: _array, list: _list, tuple: _tuple, dict: _dict, deque: _deque, set: _flat})
_COPIERS.update({bytearray: _flat, MethodType: _method, FunctionType: _function})


def _learn(kind: type) -> Copier:
    if issubclass(kind, (enum.Enum, np.generic, np.dtype)):
        return _same
    if issubclass(kind, msgspec.Struct):
        if kind.__struct_config__.frozen:
            return _same
        raise TypeError(f"{kind.__name__} is a struct that can change; it needs a copier of its own")
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return _same
    if issubclass(kind, tuple):
        return _tuple
    if kind.__module__.split(".")[0] in ("allocator", "daemon", "tools", "tests"):
        return _object(kind)
    raise TypeError(f"{kind.__module__}.{kind.__name__} has no copier")
