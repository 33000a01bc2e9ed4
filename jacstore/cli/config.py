"""Values of flags from a TOML file, with one table for each command; what stands on the command line goes before."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any

import click

from jacstore.errors import InvalidRequestError

COMMANDS = ("build", "gram")
# These belong to one call, not to a result: a file that is used again must not start over each time.
NOT_IN_A_FILE = {"config", "help", "as_json", "debug", "quiet", "dry_run", "overwrite"}


def configured(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --config; the command gets the values that it took from the file as `config`, None without a file."""
    return click.option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=_take,
        help="A TOML file with values of flags below [build] and [gram]; it is kept with the result.",
    )(command)


def _take(context: click.Context, _: click.Parameter, path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    settings = read_config(path, str(context.info_name), _allowed(context.command))
    # click asks this mapping where a flag is not given, and converts what it finds like words of the command line.
    context.default_map = {**(context.default_map or {}), **settings}
    return settings


def _allowed(command: click.Command) -> list[str]:
    names = [str(one.name) for one in command.params if isinstance(one, click.Option)]
    return [name for name in names if name not in NOT_IN_A_FILE]


def read_config(path: str, command: str, allowed: list[str]) -> dict[str, Any]:
    """Values of a command's flags, by keyword.

    Raises
    ------
    InvalidRequestError
        If the file cannot be read, or names what the command does not have.
    """
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise InvalidRequestError(f"--config {path} cannot be read ({error.strerror}); give a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"--config {path}: not TOML ({error}); see https://toml.io") from error
    for name, table in found.items():
        if name not in COMMANDS or not isinstance(table, dict):
            raise InvalidRequestError(f"--config {path}: {name}: allowed are the tables [build] and [gram]")
    settings = {}
    for key, value in found.get(command, {}).items():
        name = key.replace("-", "_")
        if name not in allowed:
            flags = ", ".join(one.replace("_", "-") for one in allowed)
            raise InvalidRequestError(f"--config {path}: {key} in [{command}]: allowed are {flags}")
        if not isinstance(value, str | int | float):
            raise InvalidRequestError(
                f"--config {path}: {key} in [{command}]: allowed are text, numbers, true and false"
            )
        settings[name] = value
    return settings
