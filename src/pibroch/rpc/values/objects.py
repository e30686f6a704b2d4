"""Dataclasses, named tuples and enum members as state, and back.

A value arrives as it was sent, with attributes beside its fields, as Python's pickles have it:
``__init__``, ``__post_init__``, ``__new__`` and ``__setattr__`` do not run. A class with
``__getstate__`` and ``__setstate__`` of its own decides itself what travels, and can check what
arrives. Dataclasses of this package are built from their fields alone by their constructors, whose
checks kernels rely on.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import types
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from pibroch.errors import NotAllowedError, ProtocolError

_ARGS = "args"  # of an exception, which lie beside its attributes
_IS_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: what a `class` statement makes
_MOST_CACHED = 4096


def state_of(value: Any) -> Any:
    """What has to travel of an enum member, a dataclass or a named tuple, in parts of any form.

    Raises:
        NotAllowedError: for what the other side would not take.
    """
    cls: Any = type(value)
    if isinstance(value, enum.Enum):
        if isinstance(value, enum.Flag):
            return value.value
        # a member that ``_missing_`` made has a name under which nobody finds it
        return value.name if cls.__members__.get(value.name) is value else [value.value]
    is_dataclass = dataclasses.is_dataclass(cls)  # asked inside `if` it would narrow the type
    if not is_dataclass:
        attributes = _attributes(value)
        return ([*value], attributes) if attributes else [*value]
    if _is_constructed(cls):
        names = [field.name for field in dataclasses.fields(value)]
        if beside := _attributes(value).keys() - set(names):
            raise NotAllowedError(
                f"attribute {min(beside)!r} of a {cls.__qualname__}", "its fields alone"
            )
        return {name: getattr(value, name) for name in names}
    _check_layout(cls)
    if _has_own(cls, "__getstate__"):
        return value.__getstate__()
    return object.__getstate__(value) if _has_own(cls, "__setstate__") else _attributes(value)


def restored(cls: Any, state: object) -> Any:
    """The value of a class that :func:`state_of` was given; ``None`` where it gives no such state.

    Raises:
        ProtocolError: for flags or fields that the class does not have, or lacks.
        NotAllowedError: for attributes that would hide a part of the class.
    """
    if issubclass(cls, enum.Enum):
        return _member(cls, state)
    is_dataclass = dataclasses.is_dataclass(cls)
    if is_dataclass:
        if _is_constructed(cls):
            return _constructed(cls, state) if isinstance(state, dict) else None
        return _dataclass(cls, state)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        items, attributes = state if isinstance(state, tuple) and len(state) == 2 else (state, {})
        if isinstance(items, list) and isinstance(attributes, dict):
            if len(items) != len(cls._fields):
                raise ProtocolError(f"{len(items)} items for {cls.__qualname__}", "one a field")
            named = tuple.__new__(cls, items)
            _set_attributes(named, attributes)
            return named
    return None


def _member(cls: Any, state: object) -> Any:
    if isinstance(state, str):
        return cls[state]
    if issubclass(cls, enum.Flag):
        return _flag(cls, state) if type(state) is int else None
    if isinstance(state, list) and len(state) == 1 and _has_own(cls, "_missing_"):
        return cls(state[0])
    return None


def _flag(cls: type[enum.Flag], state: int) -> enum.Flag:
    """Flags of an enum; unknown bits are refused, as each would add a member to the class."""
    all_flags = 0
    for member in cls.__members__.values():
        all_flags |= member.value
    if state & ~all_flags:
        raise ProtocolError(f"the flags {state:#x}", f"those of {cls.__qualname__}")
    return cls(state)


def _constructed(cls: Any, state: dict[str, Any]) -> Any:
    """A dataclass: its constructor gets the fields that it takes, the others are set after it."""
    fields = dataclasses.fields(cls)
    if state.keys() - {field.name for field in fields}:
        raise ProtocolError(
            f"{len(state)} fields for {cls.__qualname__}, not all of them known",
            "those of the dataclass",
        )
    result = cls(
        **{field.name: state[field.name] for field in fields if field.init and field.name in state}
    )
    for field in fields:
        if not field.init and field.name in state:
            object.__setattr__(result, field.name, state[field.name])
    return result


def _dataclass(cls: Any, state: Any) -> Any:
    _check_layout(cls)
    result: Any = (BaseException if issubclass(cls, BaseException) else object).__new__(cls)
    if _has_own(cls, "__setstate__"):
        if state is not None:  # as in pickles
            result.__setstate__(state)
        return result
    parts = state if isinstance(state, tuple) else (state,)
    if not all(isinstance(part, dict | None) for part in parts):
        return None
    attributes = {name: item for part in parts if part for name, item in part.items()}
    if not _has_own(cls, "__getstate__"):
        _check_fields(cls, attributes)
    _set_attributes(result, attributes)
    return result


def _check_fields(cls: Any, attributes: Mapping[str, object]) -> None:
    if missing := _needed(cls) - attributes.keys():
        raise ProtocolError(f"{cls.__qualname__} without {min(missing)!r}", "all of its fields")


@lru_cache(_MOST_CACHED)
def _needed(cls: type) -> frozenset[str]:
    """The fields that lie in a dataclass's objects, and have no default in the class."""
    of_class = {
        field.name: inspect.getattr_static(cls, field.name, dataclasses.MISSING)
        for field in dataclasses.fields(cls)
        if field.init
    }
    return frozenset(
        name for name, there in of_class.items() if there is dataclasses.MISSING or _is_slot(there)
    )


def _attributes(value: object) -> dict[str, object]:
    """What lies in an object's slots and dictionary, by name.

    Names with two underscores at both ends are Python's own, such as ``__orig_class__`` of a
    generic type's object.
    """
    state = object.__getstate__(value)
    parts = state if isinstance(state, tuple) else (state,)
    attributes = {
        name: item
        for part in parts
        for name, item in (part or {}).items()
        if not (name.startswith("__") and name.endswith("__"))
    }
    if isinstance(value, BaseException):
        attributes[_ARGS] = value.args
    return attributes


def _set_attributes(value: object, attributes: Mapping[str, object]) -> None:
    """Put attributes where they lie, past what the class does when one is set."""
    cls: Any = type(value)
    for name, item in attributes.items():
        if isinstance(value, BaseException) and name == _ARGS:
            value.args = tuple(cast(Any, item))
        elif (slot := _slot(cls, name)) is not None:
            slot.__set__(value, item)
        else:
            vars(value)[name] = item


@lru_cache(_MOST_CACHED)
def _slot(cls: type, name: str) -> types.MemberDescriptorType | None:
    """The slot of an attribute; ``None`` where it lies in the object's dictionary.

    Raises:
        NotAllowedError: for what would hide a method or a property, or is Python's own.
    """
    if name.startswith("__") or not name.isidentifier():
        raise NotAllowedError(f"an attribute {name[:40]!r}", "a name without two underscores")
    of_class = inspect.getattr_static(cls, name, None)
    if _is_slot(of_class):
        return cast(types.MemberDescriptorType, of_class)
    is_field = dataclasses.is_dataclass(cls) and name in {f.name for f in dataclasses.fields(cls)}
    is_cache = isinstance(of_class, functools.cached_property)
    if hasattr(type(of_class), "__get__") and not is_field and not is_cache:
        got = f"an attribute {name[:40]!r} that hides a part of {cls.__qualname__}"
        raise NotAllowedError(got, "another name")
    return None


def _is_slot(of_class: object) -> bool:
    return isinstance(of_class, types.MemberDescriptorType)


@lru_cache(_MOST_CACHED)
def _is_constructed(cls: type) -> bool:
    return any(base.__module__.partition(".")[0] == "pibroch" for base in cls.__mro__)


@lru_cache(_MOST_CACHED)
def _has_own(cls: type, name: str) -> bool:
    """Whether a class has a method that somebody wrote in Python, not one that a decorator made."""
    method = getattr(cls, name, None)
    method = getattr(method, "__func__", method)
    made_by = ("dataclasses", "enum")
    return isinstance(method, types.FunctionType) and method.__module__ not in made_by


@lru_cache(_MOST_CACHED)
def _check_layout(cls: type) -> None:
    """Refuse a dataclass that is a list or a dict as well, whose content is no attribute."""
    for base in cls.__mro__:
        is_builtin = not base.__flags__ & _IS_HEAP_TYPE
        if is_builtin and base is not object and not issubclass(base, BaseException):
            raise NotAllowedError(
                f"a dataclass {cls.__qualname__} that is a {base.__name__} as well",
                "one that holds its data in fields",
            )
