"""Run a command: report on stdout, progress and one line per error on stderr, an exit code.

Exit codes: 0 done; 2 the user must change something; 3 data failed a check; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from jacstore.base import leaving
from jacstore.base.events import BatchDone, Event, ItemDone, SlabDone, Started, UnitDone, Waiting
from jacstore.base.limits import LIMITS
from jacstore.errors import DamagedDataError, InvalidRequestError, JacstoreError, one_line, printable

T = TypeVar("T")
SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")
# How often a signal is looked for where a system does not wake who waits, and how long work may take to end by itself.
LOOK_SECONDS, GRACE_SECONDS = 0.1, 0.5


class Stop:
    """Remember a signal, which the work asks for between its steps. A second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._ends_at_once = False

    def install(self) -> None:
        for name in SIGNALS:
            if hasattr(signal, name) and threading.current_thread() is threading.main_thread():
                signal.signal(getattr(signal, name), self._handle)

    def _handle(self, number: int, _: Any) -> None:
        again, self.received = self.received is not None, self.received or signal.Signals(number).name
        if again or self._ends_at_once:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def unasked(self) -> Iterator[None]:
        """Inside, the user's lines run in the main thread: they do not ask, so that the first signal ends them.

        Signals are handled anew after them, for what is imported there may have taken them.
        """
        self._ends_at_once = True
        try:
            yield
        finally:
            self._ends_at_once = False
            self.install()

    def __call__(self) -> bool:
        return self.received is not None


class Lines:
    """A progress listener: a bar on a terminal, a line every few seconds elsewhere; always on stderr."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.total = self.done = self.small = 0
        self.what = ""
        self.started = self.shown = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, event: Event) -> None:
        if self.quiet:
            return
        if isinstance(event, Waiting):
            click.echo(event.reason, err=True)
        elif isinstance(event, Started):
            self.what, self.total, self.done = event.what, event.total, event.done
            if sys.stderr.isatty():
                self._open_bar()
        elif isinstance(event, UnitDone | ItemDone):
            self.done += 1
            self.small = 0
        elif isinstance(event, BatchDone):
            self.small += event.examples
        elif isinstance(event, SlabDone):
            self.small = event.slab + 1
        self._show()

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self.what, total=self.total, completed=self.done, text="")
        self._bar.start()

    def _show(self) -> None:
        text = f"{self.done} of {self.total} {self.what}"
        if self.small:
            text += f" and {self.small} {'examples' if self.what == 'units' else 'slabs'} of the next"
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, text=text)
        elif self.what and time.monotonic() - self.shown > LIMITS.progress_seconds:
            self.shown = time.monotonic()
            click.echo(f"{text}, {self.shown - self.started:.0f} s", err=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class Words(click.Choice):
    """The words that a flag allows; others are refused with the same text as for the keyword in Python."""

    def __init__(self, *words: str) -> None:
        super().__init__(words)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.choices:
            return value
        flag, keyword = (param.opts[0], f" ({param.name}=)") if param is not None else ("value", "")
        raise InvalidRequestError(f"{flag} {value}: allowed are {', '.join(self.choices)}{keyword}")


class WordsOf(Words):
    """The words that a module holds by this name; it is loaded when the flag is used or explained."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name
        super().__init__()

    @property
    def choices(self) -> tuple[str, ...]:
        import importlib

        return tuple(getattr(importlib.import_module(f"jacstore.{self._module}"), self._name))

    @choices.setter
    def choices(self, _: Any) -> None:
        """Left as it is: Click sets it once, to nothing."""


class OneLineErrors(click.Group):
    """A group whose usage errors are one line, like all others."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            returned = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            click.echo(f"jacstore: {one_line(error.format_message())} (jacstore --help lists all)", err=True)
            sys.exit(2)
        except click.Abort:
            sys.exit(130)
        except JacstoreError as error:
            click.echo(f"jacstore: {error}", err=True)
            sys.exit(error.exit_code)
        sys.exit(returned if isinstance(returned, int) else 0)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The options that every command has."""

    as_json: bool
    debug: bool
    quiet: bool


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that all commands share; the command gets them as its first argument."""

    @functools.wraps(command)
    def called(*, as_json: bool, debug: bool, quiet: bool, **options: Any) -> Any:
        return command(Shared(as_json=as_json, debug=debug, quiet=quiet), **options)

    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else there."),
        click.option("--debug", is_flag=True, help="Show the traceback of an error."),
        click.option("--quiet", is_flag=True, help="No progress on stderr."),
    ):
        called = option(called)
    return called


def run(
    work: Callable[[Lines, Stop], T],
    text: Callable[[T], str],
    shared: Shared,
    judge: Callable[[T], str] = lambda report: "",
    at_once: str | None = None,
) -> None:
    """Do the work and print its report, a dict or what has a `to_dict`.

    Errors, and what `judge` says about the report, become one line and an exit code.

    With `at_once` a signal does not wait for the work; its words say what the same command does afterwards.
    """
    stop, lines = Stop(), Lines(shared.quiet)
    stop.install()
    try:
        report = work(lines, stop) if at_once is None else interruptible(work, lines, stop, at_once)
        lines.close()
        said = json.dumps(_plain(to_dict(report))) if shared.as_json else text(report)
        click.echo("\n".join(printable(line) for line in said.split("\n")))
        if judge(report):
            raise DamagedDataError(judge(report))
    except JacstoreError as error:
        lines.close()
        _fail(error, error.exit_code, shared.debug, stop)
    except KeyboardInterrupt as error:
        lines.close()
        _fail(error, 130, shared.debug, stop)
    except BrokenPipeError:
        sys.exit(0)
    except MemoryError as error:
        lines.close()
        given = RuntimeError(f"not enough memory: {error}; give less --memory, smaller tiles or units, or free some")
        _fail(given.with_traceback(error.__traceback__), 2, shared.debug, stop)
    except Exception as error:
        lines.close()
        if stop():
            _fail(error, 130, shared.debug, stop)
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        problem = RuntimeError(
            f"{type(error).__name__}: {error}{notes}; internal error; please report it, "
            "with the traceback that --debug prints"
        )
        _fail(problem.with_traceback(error.__traceback__), 2, shared.debug, stop)


def to_dict(report: Any) -> dict[str, Any]:
    """A report as JSON."""
    found: dict[str, Any] = report if isinstance(report, dict) else report.to_dict()
    return found


def interruptible(work: Callable[[Lines, Stop], T], lines: Lines, stop: Stop, again: str) -> T:
    """Return or raise what the work does. After a signal the process leaves, though LAPACK may run for minutes more.

    NumPy's LAPACK and BLAS let this thread run meanwhile. SciPy's do not: a signal waits for the call that runs.
    """
    if threading.current_thread() is not threading.main_thread():
        return work(lines, stop)
    done, found = threading.Event(), _Outcome()
    context = contextvars.copy_context()

    def do() -> None:
        try:
            found.report = context.run(work, lines, stop)
        except BaseException as error:
            found.error = error
        done.set()

    threading.Thread(target=do, name="jacstore-command", daemon=True).start()
    # Only the main thread hears signals, and only between steps of Python.
    while not done.wait(LOOK_SECONDS):
        if stop() and not _ended(done):
            _leave(lines, stop, again)
    if found.error is not None:
        raise found.error
    report: T = found.report
    return report


@dataclass
class _Outcome:
    """The report or the error of work in another thread."""

    report: Any = None
    error: BaseException | None = None


def _ended(done: threading.Event) -> bool:
    """Whether work that asks for signals ends by itself; after a second signal it is not waited for."""
    try:
        return done.wait(GRACE_SECONDS)
    except KeyboardInterrupt:
        return False


def _leave(lines: Lines, stop: Stop, again: str) -> None:
    """End the process in the middle of its work, which is as safe as being killed."""
    lines.close()
    leaving.give_all_up()
    click.echo(f"jacstore: {stop.received}: interrupted, nothing is lost; {again}: {_command_line()}", err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


def _fail(error: BaseException, code: int, debug: bool, stop: Stop) -> None:
    if debug:
        import traceback

        traceback.print_exception(error)
    message = one_line(str(error))
    if code == 130:
        message = f"{stop.received or 'SIGINT'}: {message or 'interrupted'}; to continue: {_command_line()}"
    click.echo(f"jacstore: {message}", err=True)
    sys.exit(code)


def _command_line() -> str:
    import shlex

    # --overwrite would start over what is to be continued.
    return "jacstore " + shlex.join(word for word in sys.argv[1:] if word != "--overwrite")


def _plain(value: Any) -> Any:
    """Replace NumPy numbers by Python's, which JSON can hold."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        return value.item()
    return value


def with_warnings(work: Callable[[], T]) -> T:
    """Do the work; print each of its warnings as one line on stderr."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        report = work()
    for warning in caught:
        click.echo(f"jacstore: warning: {warning.message}", err=True)
    return report
