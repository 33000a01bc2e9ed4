"""Options of a build or a gram, each declared once: its default, what it allows and what --help says of it.

A frozen dataclass that derives from `Options` has one field for each option, made by `host_memory`, `size`,
`count`, `word`, `switch`, `pair`, `one_part`, `devices` or `other`. Values are parsed and checked when it is made, so
that whoever holds it holds valid ones; cli/flags.py makes a flag of every field.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from jacstore.base.limits import MAX_ITEMS
from jacstore.base.machine import default_memory, parse_size
from jacstore.errors import InvalidRequestError

Chosen = TypeVar("Chosen", bound="Options")
# Types of the keywords, as functions that take them declare them.
Size = int | str | None
Pair = tuple[int, int] | str | None
Devices = str | int | Sequence[int] | None
_DECLARED = "jacstore option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: `parse(given, flag)` gives its value or refuses, the rest is for --help."""

    help: str
    parse: Callable[[Any, str], Any]
    metavar: str | None = None
    # The words that are allowed, where it takes one of some.
    words: tuple[str, ...] = ()
    # The type that the command line turns its text into; a switch has no text.
    type: type = str


class Options:
    """Base of dataclasses whose every field is an option."""

    def __post_init__(self) -> None:
        for name, option in described(type(self)).items():
            object.__setattr__(self, name, option.parse(getattr(self, name), flag_of(name)))

    @classmethod
    def among(cls: type[Chosen], given: Mapping[str, Any]) -> Chosen:
        """Those of the keywords `given` to a function that are options."""
        return cls(**{name: given[name] for name in described(cls)})


def described(options: Any) -> dict[str, Option]:
    """The options that a dataclass declares, in order, by the name of their keyword."""
    return {one.name: one.metadata[_DECLARED] for one in fields(options)}


def flag_of(name: str) -> str:
    """The flag of a keyword."""
    return "--" + name.replace("_", "-")


def keyword_of(flag: str) -> str:
    """The keyword of a flag, as messages name it."""
    return f"{flag.removeprefix('--').replace('-', '_')}="


# ------------------------------------------------------------------------------------------------------ kinds of fields


def host_memory(help: str) -> Any:
    """Bytes of the host; half of what is available if not given."""
    return _field(None, Option(help=help, parse=lambda given, _: default_memory(given), metavar="SIZE"))


def size(help: str, default: Size = None) -> Any:
    """Bytes; without a default, None if not given."""
    return _field(default, Option(help=help, parse=_closed(parse_size, default), metavar="SIZE"))


def count(help: str, default: int | None = None) -> Any:
    """An integer of at least 1; without a default, None if not given."""
    return _field(default, Option(help=help, parse=_closed(parse_count, default), metavar="N", type=int))


def word(default: str | None, words: tuple[str, ...], help: str) -> Any:
    """One of some words; with the default None it may be left open."""

    def parse(given: Any, flag: str) -> str | None:
        return None if default is None and given is None else parse_word(given, words, flag)

    return _field(default, Option(help=help, parse=parse, words=words))


def switch(help: str) -> Any:
    """True or False, which is the default."""
    return _field(False, Option(help=help, parse=parse_switch, type=bool))


def pair(form: str, help: str) -> Any:
    """Two integers, such as the range A:B; None if not given."""
    (separator,) = (sign for sign in form if not sign.isalpha())
    return _field(
        None, Option(help=help, parse=lambda given, flag: parse_pair(given, separator, flag, form), metavar=form)
    )


def one_part(help: str) -> Any:
    """Part I of N; 1 of 1 if not given."""
    return _field(None, Option(help=help, parse=lambda given, _: parse_part(given), metavar="I/N"))


def devices(help: str) -> Any:
    """Devices of a process: "all", the first N, or a tuple of their numbers; None, which means all, if not given."""
    return _field(None, Option(help=help, parse=parse_devices, metavar="all|N|I,J"))


def other(default: Any, parse: Callable[[Any, str], Any], help: str) -> Any:
    """A text that is parsed in a way of its own."""
    return _field(default, Option(help=help, parse=parse))


def _closed(parse: Callable[[Any, str], Any], default: Any) -> Callable[[Any, str], Any]:
    """The same parser; where there is a default, None is refused like any other value that is none."""
    if default is None:
        return parse
    return lambda given, flag: parse("None" if given is None else given, flag)


def _field(default: Any, option: Option) -> Any:
    return field(default=default, metadata={_DECLARED: option})


# -------------------------------------------------------------------------------------------------------------- parsers


def parse_word(given: Any, words: tuple[str, ...], flag: str) -> str:
    """One of some words; a type of NumPy is taken by its name."""
    if str(given) not in words:
        raise InvalidRequestError(f"{flag} {given}: allowed are {', '.join(words)} ({keyword_of(flag)})")
    return str(given)


def parse_switch(given: Any, flag: str) -> bool:
    """True or False; a text such as "false" is true to Python, and refused here."""
    if isinstance(given, str) or str(given) not in ("True", "False", "1", "0"):
        raise InvalidRequestError(f"{flag}: {keyword_of(flag)}{given!r}; allowed are True and False")
    return bool(given)


def parse_pair(given: Pair, separator: str, flag: str, form: str) -> tuple[int, int] | None:
    """Two integers from `A:B`, `I/N` or a pair."""
    if given is None:
        return None
    try:
        first, second = (int(x) for x in (given.split(separator) if isinstance(given, str) else given))
    except (ValueError, TypeError):
        raise InvalidRequestError(f"{flag} {given}: allowed is {form} with two integers ({keyword_of(flag)})") from None
    return first, second


def parse_part(given: Pair) -> tuple[int, int]:
    """Part I of N, counted from 1."""
    number, parts = parse_pair(given, "/", "--part", "I/N") or (1, 1)
    if not 1 <= number <= parts:
        raise InvalidRequestError(
            f"--part {number}/{parts}: allowed are 1/{max(parts, 1)} to {max(parts, 1)}/{max(parts, 1)} (part=)"
        )
    if parts > MAX_ITEMS:
        raise InvalidRequestError(
            f"--part {number}/{parts}: at most {MAX_ITEMS:,} parts are allowed; give a smaller N (part=)"
        )
    return number, parts


def parse_devices(given: Any, flag: str) -> str | int | tuple[int, ...] | None:
    """Which devices: whether they are there is known only to a process that has loaded JAX."""
    if given is None or (isinstance(given, str) and given == "all"):
        return given
    try:
        if isinstance(given, bool):
            raise ValueError
        if isinstance(given, str):
            return tuple(int(n) for n in given.split(",")) if "," in given else int(given)
        return tuple(operator.index(n) for n in given) if isinstance(given, Sequence) else operator.index(given)
    except (TypeError, ValueError):
        raise InvalidRequestError(
            f"{flag} {given}: allowed are all, a count from 1, or different numbers from 0 such as 0,2 "
            f"({keyword_of(flag)})"
        ) from None


def parse_count(given: int | None, flag: str) -> int | None:
    """An integer of at least 1, of whatever integer type; None stays None."""
    if given is None:
        return None
    try:
        number = 0 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = 0
    if number < 1:
        raise InvalidRequestError(f"{flag} {given}: must be an integer of at least 1 ({keyword_of(flag)})")
    return number
