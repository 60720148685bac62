"""Graph: the whole state behind one object as canonical bytes, and back.

Owns the encoding and nothing of what it means: plain values, containers, numpy arrays, enums, and instances of classes
with slots or attributes, each shared object once and named by number. Must never run code that the bytes name: a
reader passes in what turns a name into a class, and no constructor is called but those of tuples and structs.
Invariants: equal states give equal bytes, whatever process they grew in; what is decoded encodes to the same bytes.

What cannot be encoded is refused by name: closures and lambdas, generators, arrays of objects, subclasses of
containers, and two arrays that share memory which may be written.

    [FORMAT, [[module, name, [fields]], ...], [[kind, ...], ...], value]      objects are numbered from 0
    a value is itself, [number] for an object, or [tag, ...] for what is copied instead of shared
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import msgspec
import numpy as np

FORMAT = 1
INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1

# Kinds of shared objects; an instance is its class's number plus INSTANCE.
LIST, DICT, SET, DEQUE, BYTEARRAY, ARRAY, INSTANCE = range(7)
PLAIN: dict[int, Callable[[], Any]] = {LIST: list, DICT: dict, SET: set}  # kinds that begin empty
# Tags of values that are copied.
TUPLE, NAMED, STRUCT, ENUM, NUMBER, INTEGER, FUNCTION, METHOD, CLASS, EXTERNAL, FROZEN, DTYPE, UNSET, EMPTY = range(14)

AS_IS = frozenset((type(None), bool, int, float, str, bytes))  # values that msgpack has itself

Find = Callable[[str, str], Any]
"""What a module and a qualified name stand for; raises for what may not be named."""


class GraphError(Exception):
    """A state that has no canonical bytes, or bytes that are no state."""


class _Unset:
    """A slot that was never given a value."""


def encode(root: object, external: Mapping[type, str] | None = None) -> bytes:
    """Canonical bytes of everything that `root` leads to. Instances of a type in `external` are named, not followed."""
    try:
        return _Encoder(external or {}, AS_IS).encode(root)
    except OverflowError:  # an integer beyond 64 bits: rare enough not to look at each
        return _Encoder(external or {}, AS_IS - {int}).encode(root)


def decode(data: bytes, find: Find, external: Mapping[str, object] | None = None) -> Any:
    """The root again; `external` says what stands for the names of objects that were not followed."""
    return _Decoder(find, external or {}).decode(data)


class _Encoder:
    """One encoding: objects are numbered as they are met, breadth first, so nothing is ever deep."""

    def __init__(self, external: Mapping[type, str], as_is: frozenset[type]) -> None:
        self._external = external
        self._as_is = as_is
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []  # in the order of their numbers; holding them keeps their ids
        self._classes: dict[tuple[type, tuple[str, ...]], int] = {}
        self._how: dict[type, Callable[[Any], Any]] = {int: _integer, **dict.fromkeys(as_is, _itself)}
        self._slots: dict[type, tuple[str, ...] | None] = {}

    def encode(self, root: object) -> bytes:
        """See `encode` of the module."""
        value = self._value(root)
        done: list[list[Any]] = []
        while len(done) < len(self._objects):
            one = self._objects[len(done)]
            done.append(self._object(one))
        self._refuse_shared_memory()
        classes = [[cls.__module__, cls.__qualname__, list(fields)] for cls, fields in self._classes]
        return msgspec.msgpack.encode([FORMAT, classes, done, value])

    def _value(self, value: Any) -> Any:
        how = self._how.get(type(value))
        return how(value) if how is not None else self._classify(type(value))(value)

    def _classify(self, kind: type) -> Callable[[Any], Any]:
        """How values of this type are written, decided once."""
        how: Callable[[Any], Any]
        if kind in self._external:
            name = self._external[kind]
            how = lambda value: [EXTERNAL, name]  # noqa: E731
        elif issubclass(kind, Enum):
            how = lambda value: [ENUM, self._class(kind), value.name]  # noqa: E731
        elif issubclass(kind, msgspec.Struct):
            how = self._struct
        elif issubclass(kind, tuple):
            how = self._tuple
        elif kind is frozenset:
            how = lambda value: [FROZEN, self._sorted(value)]  # noqa: E731
        elif issubclass(kind, np.generic):
            how = lambda value: [NUMBER, value.dtype.str, value.tobytes()]  # noqa: E731
        elif issubclass(kind, np.dtype):
            how = lambda value: [DTYPE, value.str]  # noqa: E731
        elif kind is np.ndarray:
            how = self._array
        elif issubclass(kind, type):
            how = lambda value: [CLASS, self._class(value)]  # noqa: E731
        elif kind is FunctionType:
            how = self._function
        elif kind is MethodType:
            how = lambda value: [METHOD, self._value(value.__self__), value.__func__.__name__]  # noqa: E731
        else:
            self._check_shared(kind)
            how = self._reference
        self._how[kind] = how
        return how

    def _check_shared(self, kind: type) -> None:
        known = (list, dict, set, deque, bytearray, np.ndarray)
        plain = kind.__module__ not in ("builtins", "collections", "numpy") and kind is not BuiltinFunctionType
        if kind not in known and (not plain or issubclass(kind, known)):
            raise GraphError(f"a {kind.__module__}.{kind.__qualname__} has no canonical bytes")

    def _reference(self, value: Any) -> list[int]:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return [number]

    def _array(self, value: np.ndarray[Any, Any]) -> list[Any]:
        """Arrays are shared, but nobody can tell one without entries from another, such as a constant of a module."""
        return self._reference(value) if value.size else [EMPTY, value.dtype.str, list(value.shape)]

    def _tuple(self, value: tuple[Any, ...]) -> list[Any]:
        items = [self._value(item) for item in value]
        return [TUPLE, items] if type(value) is tuple else [NAMED, self._class(type(value)), items]

    def _struct(self, value: msgspec.Struct) -> list[Any]:
        fields = value.__struct_fields__
        return [STRUCT, self._class(type(value), fields), [self._value(getattr(value, name)) for name in fields]]

    def _function(self, value: FunctionType) -> list[Any]:
        if "<" in value.__qualname__:
            raise GraphError(f"{value.__module__}.{value.__qualname__}: a function needs a name")
        return [FUNCTION, value.__module__, value.__qualname__]

    def _sorted(self, items: Any) -> list[Any]:
        """A set has no order of its own."""
        return sorted((self._value(item) for item in items), key=msgspec.msgpack.encode)

    def _class(self, cls: type, fields: tuple[str, ...] = ()) -> int:
        return self._classes.setdefault((cls, fields), len(self._classes))

    def _object(self, one: Any) -> list[Any]:
        """The record of one shared object."""
        kind, value = type(one), self._value
        if kind is list:
            return [LIST, *(one if self._as_is.issuperset(map(type, one)) else map(value, one))]
        if kind is dict:
            record: list[Any] = [DICT]
            for key, item in one.items():
                record += (value(key), value(item))
            return record
        if kind is np.ndarray:
            if one.dtype.hasobject:
                raise GraphError(f"an array of {one.dtype} has no canonical bytes")
            return [ARRAY, one.dtype.str, list(one.shape), one.flags.writeable, one.tobytes()]
        if kind is deque:
            return [DEQUE, one.maxlen, *map(value, one)]
        if kind is set:
            return [SET, *self._sorted(one)]
        if kind is bytearray:
            return [BYTEARRAY, bytes(one)]
        return self._instance(one)

    def _instance(self, one: Any) -> list[Any]:
        cls = type(one)
        slots = self._slots.get(cls)
        if slots is None:
            slots = self._slots[cls] = _slots(cls)
        own = getattr(one, "__dict__", None)
        fields = (*slots, *sorted(own)) if own else slots
        record: list[Any] = [INSTANCE + self._class(cls, fields)]
        try:
            for name in fields:
                item = getattr(one, name, _Unset)
                if type(item) in self._as_is:  # nearly all are: worth the second look at the type
                    record.append(item)
                else:
                    record.append([UNSET, 0] if item is _Unset else self._value(item))
        except GraphError as error:
            raise GraphError(f"{cls.__qualname__}.{name}: {error}") from error
        return record

    def _refuse_shared_memory(self) -> None:
        """Two arrays over the same bytes would be two arrays after decoding, and a write to one lost to the other."""
        over: dict[int, list[np.ndarray[Any, Any]]] = {}
        for one in self._objects:
            if type(one) is np.ndarray and one.size:
                base: Any = one
                while type(base.base) is np.ndarray:
                    base = base.base
                over.setdefault(id(base), []).append(one)
        for arrays in over.values():
            writeable = any(array.flags.writeable for array in arrays)
            if len(arrays) > 1 and writeable and any(np.may_share_memory(arrays[0], other) for other in arrays[1:]):
                raise GraphError(f"{len(arrays)} arrays of shape {arrays[0].shape} share memory that may be written")


def _itself(value: Any) -> Any:
    return value


def _integer(value: int) -> Any:
    return value if INT_MIN <= value <= INT_MAX else [INTEGER, str(value)]


def _slots(cls: type) -> tuple[str, ...]:
    """Every slot of a class and its bases, sorted."""
    names: set[str] = set()
    for base in cls.__mro__:
        own = base.__dict__.get("__slots__", ())
        names.update((own,) if isinstance(own, str) else own)
    return tuple(sorted(names - {"__dict__", "__weakref__"}))


def _check_fields(cls: type, fields: list[str]) -> None:
    """Raise GraphError where the class has other fields than when the state was written down: half an object is none.

    Attributes without a slot are the reader's to look at: there is no list of them.
    """
    slots = _slots(cls)
    other = [name for name in slots if name not in fields]
    if not cls.__dictoffset__:
        other += [name for name in fields if name not in slots]
    if other:
        raise GraphError(f"a {cls.__module__}.{cls.__qualname__} of another version: {', '.join(other)}")


class _Decoder:
    """One decoding: empty objects first, then what they hold, and dicts and sets last, whose keys must be whole."""

    def __init__(self, find: Find, external: Mapping[str, object]) -> None:
        self._find = find
        self._external = external
        self._classes: list[tuple[Any, list[str]]] = []
        self._objects: list[Any] = []

    def decode(self, data: bytes) -> Any:
        """See `decode` of the module."""
        try:
            form, classes, records, root = msgspec.msgpack.decode(data)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise GraphError(f"no canonical state: {error}") from error
        if form != FORMAT:
            raise GraphError(f"a state of format {form}, this version reads {FORMAT}")
        self._classes = [(self._find(module, name), fields) for module, name, fields in classes]
        for kind in sorted({record[0] - INSTANCE for record in records if record[0] >= INSTANCE}):
            _check_fields(*self._classes[kind])
        self._objects = [self._shell(record) for record in records]
        last = []
        for one, record in zip(self._objects, records, strict=True):
            if record[0] in (DICT, SET):
                last.append((one, record))
            else:
                self._fill(one, record)
        for one, record in last:
            self._fill(one, record)
        return self._value(root)

    def _shell(self, record: list[Any]) -> Any:
        """An object of the right kind; arrays are complete."""
        kind = record[0]
        if kind == ARRAY:
            _, dtype, shape, writeable, data = record
            array = np.frombuffer(data, dtype).reshape(shape).copy()
            array.flags.writeable = writeable
            return array
        if kind == DEQUE:
            return deque(maxlen=record[1])
        if kind == BYTEARRAY:
            return bytearray(record[1])
        if kind < INSTANCE:
            return PLAIN[kind]()
        cls = self._classes[kind - INSTANCE][0]
        return cls.__new__(cls)

    def _fill(self, one: Any, record: list[Any]) -> None:
        kind, value = record[0], self._value
        if kind == LIST:
            one.extend(map(value, record[1:]))
        elif kind == DICT:
            one.update(zip(map(value, record[1::2]), map(value, record[2::2]), strict=True))
        elif kind == SET:
            one.update(map(value, record[1:]))
        elif kind == DEQUE:
            one.extend(map(value, record[2:]))
        elif kind >= INSTANCE:
            for name, item in zip(self._classes[kind - INSTANCE][1], record[1:], strict=True):
                if type(item) is not list or item[0] != UNSET or len(item) == 1:
                    object.__setattr__(one, name, value(item))  # frozen ones too

    def _value(self, value: Any) -> Any:
        if type(value) is not list:
            return value
        return self._objects[value[0]] if len(value) == 1 else self._copied(value)

    def _copied(self, value: list[Any]) -> Any:
        """A value that is not shared."""
        tag = value[0]
        if tag == TUPLE:
            return tuple(map(self._value, value[1]))
        if tag in (NAMED, STRUCT):
            return self._classes[value[1]][0](*map(self._value, value[2]))
        if tag == ENUM:
            return self._classes[value[1]][0][value[2]]
        if tag == NUMBER:
            return np.frombuffer(value[2], value[1])[0]
        if tag == INTEGER:
            return int(value[1])
        if tag == FUNCTION:
            return self._find(value[1], value[2])
        if tag == METHOD:
            return getattr(self._value(value[1]), value[2])
        if tag == CLASS:
            return self._classes[value[1]][0]
        if tag == EXTERNAL:
            return self._external[value[1]]
        if tag == FROZEN:
            return frozenset(map(self._value, value[1]))
        if tag == EMPTY:
            return np.zeros(value[2], value[1])
        if tag == DTYPE:
            return np.dtype(value[1])
        raise GraphError(f"a value with the unknown tag {tag}")
