"""A text of a jaxpr that is the same in every process, whatever was traced before.

JAX's own text prints a part that two equations share only once and refers to it; which parts are shared depends on what
JAX's caches still hold. Here every part is printed in full and variables are numbered by position.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

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


class _Writer:
    """Writes one program; each part that it has is written once, however often it is used."""

    def __init__(self) -> None:
        self._digests: dict[int, str] = {}
        self.primitives: set[str] = set()

    def program(self, jaxpr: ClosedJaxpr | Jaxpr) -> str:
        body = getattr(jaxpr, "jaxpr", jaxpr)
        numbers: dict[Any, int] = {}

        def named(variables: Any) -> str:
            return " ".join(f"{numbers.setdefault(v, len(numbers))}:{v.aval}" for v in variables)

        def used(variables: Any) -> str:
            return " ".join(_literal(v) if isinstance(v, Literal) else str(numbers[v]) for v in variables)

        lines = [f"{named(body.constvars)} ; {named(body.invars)} ; {self._written(body.effects)}"]
        for equation in body.eqns:
            self.primitives.add(equation.primitive.name)
            called = f"{equation.primitive.name}{self._written(equation.params)} {used(equation.invars)}"
            lines.append(f"{named(equation.outvars)} = {called} {self._written(equation.effects)}")
        return "\n".join([*lines, used(body.outvars)])

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
            return f"{value.dtype}{list(value.shape)}"
        return self._object(value)

    def _object(self, value: Any) -> str:
        """Whatever else a parameter is: never by its address, which is another one in every process."""
        if isinstance(value, functools.partial):
            return f"partial{self._written((value.func, value.args, value.keywords))}"
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.compare}
            return f"{type(value).__qualname__}{self._written(fields)}"
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        return f"{type(value).__qualname__} {name}" if name else without_addresses(repr(value))


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
