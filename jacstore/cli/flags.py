"""Flags made from the options that functions declare: the same names, defaults, words and help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click

from jacstore.base.options import Option, Options, described, flag_of
from jacstore.cli.terminal import Words


def flags_of(options: type[Options]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that adds a flag for every option, in order."""
    # Whatever derives from Options is a dataclass.
    defaults = {one.name: one.default for one in fields(options)}  # type: ignore[arg-type]

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, option in reversed(described(options).items()):
            command = _flag(flag_of(name), option, defaults[name])(command)
        return command

    return add


def _flag(flag: str, option: Option, default: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    if option.type is bool:
        return click.option(flag, is_flag=True, default=default, help=option.help)
    return click.option(
        flag,
        type=Words(*option.words) if option.words else option.type,
        metavar=option.metavar,
        default=default,
        show_default=default is not None,
        help=option.help,
    )
