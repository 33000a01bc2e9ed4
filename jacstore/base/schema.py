"""Parse JSON that nobody vouches for into values of declared types, or raise `DamagedDataError` naming the field.

The metadata of a store may be torn, edited or made up. Text becomes JSON here, and JSON becomes dataclasses here:
behind this door a number is finite, a count is not negative, and a text can be printed.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from jacstore.errors import DamagedDataError

T = TypeVar("T")
# A number below zero is allowed only where it is declared so.
Signed = Annotated[int, "signed"]
# Flops of the largest kernels take more than 64 bits; nothing takes more than this.
LARGEST = 2**127
DEEPEST = 50


class Open:
    """A dataclass that describes some of the fields of a JSON object; the object may have others."""


class Reported:
    """A dataclass that is told to users: its fields are the keys of a JSON object.

    Functions return such values, and `to_dict` is called where JSON is written. The attributes `report` and `numerics`
    and the method `info` of stores and kernels, and `rounding` of stores, are dicts, as they have been promised.
    """

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        # Whatever derives from this is a dataclass.
        return asdict(self)  # type: ignore[call-overload]


def parse(data: bytes, name: str) -> dict[str, Any]:
    """A JSON object.

    Raises
    ------
    DamagedDataError
        If it is anything else: torn, not UTF-8, nested too deeply, with numbers that are not finite.
    """
    try:
        found = json.loads(data, parse_constant=_finite, parse_float=_finite)
        _check_depth_and_text(found)
    except (ValueError, RecursionError):
        raise DamagedDataError(f"{name} is not readable JSON") from None
    if not isinstance(found, dict):
        raise DamagedDataError(f"{name} is not a JSON object")
    return found


def short_hash(value: Any) -> str:
    """A hash of a JSON value, 128 bits: enough against accidents."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _check_depth_and_text(found: Any) -> None:
    level = [found]
    for _ in range(DEEPEST):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                deeper += [*item, *item.values()]
            elif isinstance(item, list):
                deeper += item
            elif isinstance(item, str):
                item.encode()
        if not deeper:
            return
        level = deeper
    raise ValueError("nested too deeply")


def typed(hint: type[T], value: Any, name: str = "") -> T:
    """Convert JSON to the type that a hint declares: a frozen dataclass, or a type that its fields may have.

    Lists become tuples. A union of dataclasses is told apart by their `kind`.

    Raises
    ------
    DamagedDataError
        Naming the first field that is missing, unknown or of another type.
    """
    found: T = _typed(hint, value, name)
    return found


def _typed(hint: Any, value: Any, name: str) -> Any:
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint):
        return _built(hint, value, name)
    if origin in (Union, UnionType):
        return _one_of(inside, value, name)
    if origin is tuple and isinstance(value, list):
        hints = inside[:1] * len(value) if inside[-1] is Ellipsis else inside
        if len(hints) != len(value):
            raise _wrong(name, value, f"{len(hints)} entries")
        return tuple(
            _typed(hint, item, f"{name}[{n}]") for n, (hint, item) in enumerate(zip(hints, value, strict=True))
        )
    if origin is dict and isinstance(value, dict):
        return {key: _typed(inside[1], item, f"{name}.{key}") for key, item in value.items()}
    return _simple(hint, value, name)


def _simple(hint: Any, value: Any, name: str) -> Any:
    if hint is int or hint == Signed:
        if type(value) is int and (0 if hint is int else -LARGEST) <= value < LARGEST:
            return value
        raise _wrong(name, value, "an integer of at least 0" if hint is int else "an integer")
    if hint is float and type(value) in (int, float) and abs(value) < LARGEST:
        return float(value)
    if hint in (str, bool) and type(value) is hint:
        return value
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        if type(value) is str and value in [*hint]:
            return hint(value)
        raise _wrong(name, value, f"one of {', '.join(hint)}")
    raise _wrong(name, value, "a " + getattr(get_origin(hint) or hint, "__name__", "value"))


def _one_of(hints: tuple[Any, ...], value: Any, name: str) -> Any:
    if value is None and NoneType in hints:
        return None
    left = [hint for hint in hints if hint is not NoneType]
    if len(left) == 1:
        return _typed(left[0], value, name)
    kinds = {hint.kind: hint for hint in left}
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise _wrong(f"{name}.kind", kind, f"one of {sorted(kinds)}")
    return _built(kinds[kind], {key: item for key, item in value.items() if key != "kind"}, name)


def _built(cls: Any, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object")
    declared, hints = fields(cls), _hints(cls)
    unknown = set(value) - {field.name for field in declared}
    if unknown and not issubclass(cls, Open):
        raise DamagedDataError(f"{name}: unknown field {_brief(min(unknown))}")
    built = {}
    for field in declared:
        inner = f"{name}.{field.name}" if name else field.name
        if field.name in value:
            built[field.name] = _typed(hints[field.name], value[field.name], inner)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise DamagedDataError(f"{inner} is missing")
    return cls(**built)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _wrong(name: str, value: Any, allowed: str) -> DamagedDataError:
    return DamagedDataError(f"{name} is {_brief(value)}; it has to be {allowed}")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
