"""Write a jaxpr as text that is the same whenever and wherever it is traced, and keep what was compiled for it.

JAX's own text names a part that two equations share once and refers to it; which parts are shared depends on what its
caches still hold. Here every part stands for its content, and variables are numbered by position.

What this process compiled for a program is kept for the next build of an equal one: a `KeptProgram` holds it, and the
few of the last builds stay.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# Programs that a process keeps, and of each how many things that were made of it.
KEPT, KEPT_PARTS = 8, 16
# Operations whose functions were traced into the program beside them, or do not count once it is differentiated.
TRACED_RULES = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}

Value = TypeVar("Value")
_traces = jax.make_user_context()


def traced_anew() -> AbstractContextManager[Any]:
    """Inside, every function is traced anew, also a jit that has been; what was compiled outside stays as it is.

    The context is part of the key that JAX keeps traces by, and each time it has another value.
    """
    return _traces(object())


def program_text(jaxpr: ClosedJaxpr | Jaxpr) -> str:
    """One line an equation; of arrays that are closed over shapes and types only, their bytes are hashed apart."""
    return _Writer().program(jaxpr)


def primitives(jaxpr: ClosedJaxpr | Jaxpr) -> set[str]:
    """Names of all operations in a program and its parts."""
    return text_and_primitives(jaxpr)[1]


def text_and_primitives(jaxpr: ClosedJaxpr | Jaxpr) -> tuple[str, set[str]]:
    """`program_text` and `primitives`, of one pass over the program."""
    writer = _Writer()
    return writer.program(jaxpr), writer.primitives


def certain_text(jaxpr: ClosedJaxpr | Jaxpr) -> str | None:
    """`program_text`; None where equal texts might compute different things.

    A callback or a rule for batches is a function, of which a jaxpr holds only the name.
    """
    writer = _Writer()
    text = writer.program(jaxpr)
    return "\n".join([text, *writer.functions]) if writer.certain else None


class _Writer:
    """Writes one program; each part that it has is written once, however often it is used.

    `certain` says whether the text, and the values of arrays, leave nothing open that decides what is computed.
    """

    def __init__(self) -> None:
        self._digests: dict[int, str] = {}
        self._inside = 0
        self.primitives: set[str] = set()
        self.certain, self.functions = True, list[str]()

    def program(self, jaxpr: ClosedJaxpr | Jaxpr) -> str:
        body = getattr(jaxpr, "jaxpr", jaxpr)
        numbers: dict[Any, int] = {}

        def named(variables: Any) -> str:
            return " ".join(f"{numbers.setdefault(v, len(numbers))}:{v.aval}" for v in variables)

        def used(variables: Any) -> str:
            return " ".join(_literal(v) if isinstance(v, Literal) else str(numbers[v]) for v in variables)

        lines = [f"{named(body.constvars)} ; {named(body.invars)} ; {self._written(body.effects)}"]
        for equation in body.eqns:
            name = equation.primitive.name
            self.primitives.add(name)
            self.certain &= "callback" not in name
            called = f"{name}{self._parameters(name, equation.params)} {used(equation.invars)}"
            lines.append(f"{named(equation.outvars)} = {called} {self._written(equation.effects)}")
        return "\n".join([*lines, used(body.outvars)])

    def _parameters(self, name: str, parameters: Mapping[str, Any]) -> str:
        """Those of an equation."""
        written = []
        for key, value in parameters.items():
            before = self.certain
            written.append(f"{key}={self._written(value)}")
            if name in TRACED_RULES and not isinstance(value, (ClosedJaxpr, Jaxpr)):
                self.certain = before
        return f"{{{' '.join(sorted(written))}}}"

    def _written(self, value: Any) -> str:
        """A parameter of an equation."""
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            if id(value) not in self._digests:
                self._digests[id(value)] = hashlib.sha256(self.program(value).encode()).hexdigest()
            return self._digests[id(value)]
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.dtype)):
            return repr(value)
        if isinstance(value, (list, tuple)):
            return f"({' '.join(map(self._written, value))})"
        if isinstance(value, Mapping):
            return f"{{{' '.join(sorted(f'{k}={self._written(v)}' for k, v in value.items()))}}}"
        if isinstance(value, (set, frozenset)):
            return f"{{{' '.join(sorted(map(self._written, value)))}}}"
        if isinstance(value, type):
            return value.__qualname__
        if hasattr(value, "__array__"):
            # Hashes of constants do not look into objects.
            self.certain &= not self._inside
            return f"{value.dtype}{list(value.shape)}"
        return self._object(value)

    def _object(self, value: Any) -> str:
        """Whatever else a parameter is: never by its address, which is another one in every process."""
        if isinstance(value, functools.partial):
            return f"partial{self._within((value.func, value.args, value.keywords))}"
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.compare}
            self.certain &= all(f.compare for f in dataclasses.fields(value))
            return f"{type(value).__qualname__}{self._within(fields)}"
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        self.certain &= self._is_known(value, name)
        return f"{type(value).__qualname__} {name}" if name else without_addresses(repr(value))

    def _is_known(self, value: Any, name: str | None) -> bool:
        """Whether an object can be no other than what is written of it."""
        if isinstance(value, jax.sharding.Mesh):
            return value.empty
        if not callable(value):
            return name is None and without_addresses(repr(value)) == repr(value)
        # A function of JAX's own modules is the same as long as the process lives.
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        own = module is not None and module.__name__.startswith("jax.") and getattr(module, name or "", None) is value
        if own:
            self.functions.append(f"{value.__module__}.{name}")
        return own

    def _within(self, value: Any) -> str:
        """What an object holds."""
        self._inside += 1
        try:
            return self._written(value)
        finally:
            self._inside -= 1


def _literal(variable: Any) -> str:
    """A number that stands in an equation by its value, an array by shape and type."""
    value = variable.val
    if np.ndim(value):
        return str(variable.aval)
    plain = not jnp.issubdtype(variable.aval.dtype, jax.dtypes.extended)
    # The same number comes as one of NumPy, of JAX or of Python.
    return f"{variable.aval}={np.asarray(value).item() if plain else value!r}"


def text_of_jax(jaxpr: ClosedJaxpr) -> str:
    """JAX's own text, which stores were compared by that were written before `program_text` was."""
    # Without colours, which JAX prints on terminals and in notebooks: a run continues wherever its output goes.
    return without_addresses(jaxpr.pretty_print(use_color=False))


def without_addresses(text: str) -> str:
    """A text without addresses of objects, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


class Recent:
    """The values that were used last, by their keys; all others are forgotten."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._values: OrderedDict[Any, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Any) -> Any:
        """The value of a key, or None."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key]

    def keep(self, key: Any, value: Value) -> Value:
        """Keep a value, and give it back."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._size:
                self._values.popitem(last=False)
        return value

    def made(self, key: Any, make: Callable[[], Value]) -> Value:
        """The value of a key, made if there is none."""
        found: Value | None = self.get(key)
        return self.keep(key, make()) if found is None else found

    def drop(self, key: Any = None) -> None:
        """Forget a key, or all."""
        with self._lock:
            if key is None:
                self._values.clear()
            else:
                self._values.pop(key, None)


class KeptProgram:
    """The backward program of one example, and what was made of it.

    Attributes
    ----------
    jaxpr
        The program; None until something is made of it.
    digest
        Its `fingerprint.exact_hash` when it was traced; None where it cannot be kept.
    facts
        What was found out about the function.
    made
        Compiled programs and whatever else follows from the program alone, by what it depends on beside.
    """

    def __init__(self) -> None:
        self.jaxpr: ClosedJaxpr | None = None
        self.digest: str | None = None
        self.facts: Any = None
        self.made = Recent(KEPT_PARTS)


# Of the last builds, by shapes, settings and the hash of a program with its constants; the outputs' shape by the first.
kept_programs, kept_outputs = Recent(KEPT), Recent(KEPT)


def forget() -> None:
    """Drop everything that was kept."""
    kept_programs.drop()
    kept_outputs.drop()


@jax.tree_util.register_static
class _Setting:
    """Stands for one setting of everything in JAX that decides how a function is traced and compiled."""


@jax.jit
def _setting() -> _Setting:
    return _Setting()


def setting_of_jax() -> Any:
    """Equal as long as JAX itself would use again what it has traced: no flag was changed, no cache was emptied."""
    return _setting.eval_shape()
