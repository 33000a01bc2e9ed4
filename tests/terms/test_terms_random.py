"""Networks drawn from building blocks: each leaf has the terms that its block promises, rows and kernels are jacrev's.

A block says what its leaves should be, by its own arithmetic: products of so many numbers against rows of so many. The
tests of fixed networks are in test_terms.py. `--hypothesis-profile random` draws more, and others each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jacstore
from jacstore import Problem
from jacstore.base.limits import LIMITS
from jacstore.base.modes import Mode
from jacstore.terms.row_products import products

EXAMPLES = 3
LIMIT = 1e-12
FAST_COMPILATION = "jax_disable_most_optimizations"
# Networks of each kind; the profile `random` is for exploring.
COUNT = 3 if settings().derandomize else 100


@pytest.fixture(autouse=True, scope="module")
def _small_leaves_count_and_programs_compile_quickly():
    before = jax.config.values[FAST_COMPILATION]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LIMITS, "smallest_factored", 0)
        # Each network is compiled several times and run three times.
        jax.config.update(FAST_COMPILATION, True)
        yield
    jax.config.update(FAST_COMPILATION, before)


# ---------------------------------------------------------------------------------------------------- what is expected


@dataclass(frozen=True, kw_only=True)
class Product:
    """A leaf whose terms store `inputs` numbers an example and `cotangents` an output, if that is less than its rows.

    Convolutions must gain twice.
    """

    terms: str
    inputs: int
    cotangents: int
    size: int

    def expected(self, k: int, layout: str) -> str:
        gain = 2 if "conv" in self.terms else 1
        pays = k * self.size > gain * (self.inputs + k * self.cotangents)
        return self.terms if pays or layout == "factored" else "dense"


@dataclass(frozen=True, kw_only=True)
class Bias:
    """A leaf that costs nothing beside its layer: one sum for each time that the layer is used."""

    layer: Product
    times: int = 1

    def expected(self, k: int, layout: str) -> str:
        return "dense" if self.layer.expected(k, layout) == "dense" else "+".join(["dot"] * self.times)


class Rows:
    """A leaf that is stored as rows whatever its size."""

    def expected(self, k: int, layout: str) -> str:
        return "dense"


class Steps:
    """A weight inside of a scan, whose steps may be positions of factors or rows, by their sizes."""

    def expected(self, k: int, layout: str) -> None:
        return None


ROWS, STEPS = Rows(), Steps()


@dataclass
class Network:
    """Parameters by block, the functions that use them, and what is expected of each leaf."""

    shape: tuple[int, ...]
    rng: np.random.Generator
    params: dict[str, Any] = field(default_factory=dict)
    leaves: dict[str, Any] = field(default_factory=dict)
    steps: list[Callable[[Any, Any], Any]] = field(default_factory=list)

    def add(
        self,
        name: str,
        apply: Callable[[Any, Any], Any],
        shape: tuple[int, ...],
        params: dict[str, tuple[tuple[int, ...], Any]] | None = None,
    ) -> None:
        """Add a block; of each leaf its shape and what is expected."""
        block = f"{len(self.steps)}-{name}"
        for leaf, (size, expected) in (params or {}).items():
            fan = math.prod(size[:-1]) if len(size) > 1 else 1
            self.params.setdefault(block, {})[leaf] = self.rng.standard_normal(size) / math.sqrt(fan)
            self.leaves[f"{block}/{leaf}"] = expected
        self.steps.append(lambda params, x: apply(params.get(block, {}), x))
        self.shape = shape

    def run(self, params: Any, x: Any) -> Any:
        for step in self.steps:
            x = step(params, x)
        return x


# ------------------------------------------------------------------------------------------------------ building blocks


ACTIVATIONS = {"tanh": jnp.tanh, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


def activation(draw: Any, net: Network) -> None:
    name = draw(st.sampled_from(sorted(ACTIVATIONS)))
    net.add(name, lambda p, x: ACTIVATIONS[name](x), net.shape)


def dense(draw: Any, net: Network) -> None:
    """`x @ w + b`, in the NTK parameterisation or not, with a bias or not."""
    *lead, c = net.shape
    d, t = draw(st.integers(1, 14)), math.prod(lead)
    ntk, bias = draw(st.booleans()), draw(st.booleans())
    layer = Product(terms="dot", inputs=t * c, cotangents=t * d, size=c * d)
    leaves: dict[str, Any] = {"w": ((c, d), layer)}
    if bias:
        leaves["b"] = ((d,), Bias(layer=layer))

    def apply(p: Any, x: Any) -> Any:
        y = x @ (p["w"] / jnp.sqrt(c) if ntk else p["w"])
        return y + (0.1 * p["b"] if ntk else p["b"]) if bias else y

    net.add("ntk" if ntk else "dense", apply, (*lead, d), leaves)


def tied(draw: Any, net: Network) -> None:
    """One weight and bias used twice; the second time as it is, or transposed, which makes unlike blocks."""
    *lead, c = net.shape
    t, turned = math.prod(lead), draw(st.booleans())
    layer = Product(terms="dot+dot", inputs=2 * t * c, cotangents=2 * t * c, size=c * c)

    def apply(p: Any, x: Any) -> Any:
        x = jnp.tanh(x @ p["w"] + p["b"])
        return x @ (p["w"].T if turned else p["w"]) + p["b"]

    leaves = {"w": ((c, c), ROWS if turned else layer), "b": ((c,), ROWS if turned else Bias(layer=layer, times=2))}
    net.add("tied", apply, net.shape, leaves)


def experts(draw: Any, net: Network) -> None:
    """A weight for each expert: the first product spreads over experts, the second has them as a batch dimension."""
    t, c = net.shape
    e, h, d = draw(st.integers(2, 3)), draw(st.integers(2, 8)), draw(st.integers(2, 8))
    leaves = {
        "a": ((e, c, h), Product(terms="dot", inputs=t * c, cotangents=t * e * h, size=e * c * h)),
        "b": ((e, h, d), Product(terms="dot", inputs=e * t * h, cotangents=e * t * d, size=e * h * d)),
    }

    def apply(p: Any, x: Any) -> Any:
        inner = jnp.tanh(jnp.einsum("tc,ech->eth", x, p["a"]))
        return jnp.tanh(jnp.einsum("eth,ehd->etd", inner, p["b"])).sum(0)

    net.add("experts", apply, (t, d), leaves)


def layer_norm(draw: Any, net: Network) -> None:
    c = net.shape[-1]

    def apply(p: Any, x: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        spread = jnp.sqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 0.1)
        return (x - mean) / spread * (1 + p["scale"]) + p["shift"]

    net.add("norm", apply, net.shape, {"scale": ((c,), ROWS), "shift": ((c,), ROWS)})


def attention(draw: Any, net: Network) -> None:
    """Heads, causal or not; query, key and value share what goes into them."""
    t, c = net.shape
    heads, each, causal = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.booleans())
    inner = heads * each
    into = Product(terms="dot", inputs=t * c, cotangents=t * inner, size=c * inner)
    out = Product(terms="dot", inputs=t * inner, cotangents=t * c, size=inner * c)

    def apply(p: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("td,dhk->thk", x, p[name]) for name in "qkv")
        scores = jnp.einsum("thk,shk->hts", q, k) / math.sqrt(each)
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
        seen = jnp.einsum("hts,shk->thk", jax.nn.softmax(scores), v)
        return x + jnp.einsum("thk,hkd->td", seen, p["out"])

    leaves = {"out": ((heads, each, c), out), **{name: ((c, heads, each), into) for name in "qkv"}}
    net.add("attention", apply, net.shape, leaves)


def gru(draw: Any, net: Network) -> None:
    """A gated recurrent unit (Cho et al. 2014, arXiv:1406.1078) by `lax.scan`: what is inside stays rows."""
    t, c = net.shape
    h = draw(st.integers(2, 5))

    def apply(p: Any, x: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            gates = jax.nn.sigmoid(x @ p["w"] + state @ p["u"] + p["b"])
            update, reset = gates[:h], gates[h:]
            new = jnp.tanh(x @ p["wn"] + (reset * state) @ p["un"])
            state = update * state + (1 - update) * new
            return state, state

        return jax.lax.scan(step, jnp.zeros(h, x.dtype), x)[1]

    shapes = {"w": (c, 2 * h), "u": (h, 2 * h), "b": (2 * h,), "wn": (c, h), "un": (h, h)}
    net.add("gru", apply, (t, h), {name: (shape, STEPS) for name, shape in shapes.items()})


def conv(draw: Any, net: Network) -> None:
    """A convolution over all axes but the last: strides, padding, dilation, pixels apart, groups, a bias or not."""
    *space, c = net.shape
    n = len(space)
    groups = draw(st.sampled_from([g for g in (1, 2, 3) if c % g == 0]))
    d = groups * draw(st.integers(1, 8 // groups + 1))
    each = st.tuples(*[st.integers(1, 2)] * n)
    window, strides, dilation = draw(st.tuples(*[st.integers(1, 3)] * n)), draw(each), draw(each)
    spread = draw(st.one_of(st.just((1,) * n), each))
    reach = [(w - 1) * a + 1 for w, a in zip(window, dilation, strict=True)]
    wide = [(s - 1) * a + 1 for s, a in zip(space, spread, strict=True)]
    padding = []
    for size, needed in zip(wide, reach, strict=True):
        low, high = draw(st.integers(-1 if size > 2 else 0, 2)), draw(st.integers(-1 if size > 2 else 0, 2))
        padding.append((low, high + max(0, needed - size - low - high)))
    positions = tuple(
        (size + low + high - needed) // stride + 1
        for size, (low, high), needed, stride in zip(wide, padding, reach, strides, strict=True)
    )
    bias = draw(st.booleans())
    shape = (*window, c // groups, d)
    layer = Product(
        terms="conv", inputs=math.prod(net.shape), cotangents=math.prod(positions) * d, size=math.prod(shape)
    )
    leaves: dict[str, Any] = {"w": (shape, layer)}
    if bias:
        leaves["b"] = ((d,), Bias(layer=layer))
    axes = "HW"[:n]

    def apply(p: Any, x: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x[None],
            p["w"],
            strides,
            padding,
            lhs_dilation=spread,
            rhs_dilation=dilation,
            dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
            feature_group_count=groups,
        )[0]
        return y + p["b"] if bias else y

    net.add("conv", apply, (*positions, d), leaves)


def max_pool(draw: Any, net: Network) -> None:
    *space, c = net.shape
    window = tuple(min(2, size) for size in space)

    def apply(p: Any, x: Any) -> Any:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (*window, 1), (*window, 1), "VALID")

    net.add("pool", apply, (*(s // w for s, w in zip(space, window, strict=True)), c))


def flatten(draw: Any, net: Network) -> None:
    net.add("flatten", lambda p, x: x.reshape(-1), (math.prod(net.shape),))


def wrapped(draw: Any, net: Network, block: Callable[[Any, Network], None]) -> None:
    """A block as it is, under `jit`, or under `remat`."""
    block(draw, net)
    how = draw(st.sampled_from([None, None, jax.jit, jax.checkpoint]))
    if how is not None:
        net.steps[-1] = how(net.steps[-1])


SEQUENCE = (dense, tied, experts, layer_norm, attention, gru, conv, activation)
IMAGE = (conv, conv, max_pool, activation, dense)
FLAT = (dense, tied, activation, layer_norm)


@st.composite
def networks(draw: Any, kind: str) -> tuple[Network, np.ndarray]:
    """A network on sequences, ids or images, and its inputs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    t = draw(st.integers(1, 4))
    if kind == "ids":
        net = Network(shape=(t,), rng=rng)
        inputs, head = _embedded(draw, net)
    elif kind == "images":
        net = Network(
            shape=(draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 3, 6]))), rng=rng
        )
        inputs, head = rng.standard_normal((EXAMPLES, *net.shape)), None
    else:
        net = Network(shape=(t, draw(st.integers(1, 12))), rng=rng)
        inputs, head = rng.standard_normal((EXAMPLES, *net.shape)), None
    for _ in range(draw(st.integers(1, 3))):
        wrapped(draw, net, draw(st.sampled_from(IMAGE if kind == "images" else SEQUENCE)))
    if head is not None:
        head(net)
    elif draw(st.booleans()):
        flatten(draw, net)
        for _ in range(draw(st.integers(1, 2))):
            wrapped(draw, net, draw(st.sampled_from(FLAT)))
    return net, inputs


def _embedded(draw: Any, net: Network) -> tuple[np.ndarray, Callable[[Network], None] | None]:
    """A table that ids look rows up in; tied, its transpose makes the outputs."""
    (t,), size, width = net.shape, draw(st.integers(2, 30)), draw(st.integers(1, 8))
    # Ids beyond the table are dropped, negative ones count from its end.
    ids = net.rng.integers(-2, size + 2, (EXAMPLES, t))
    block = "0-embedding"
    net.params[block] = {"table": net.rng.standard_normal((size, width))}
    net.steps.append(lambda params, x: params[block]["table"][x])
    net.shape = (t, width)
    net.leaves[f"{block}/table"] = Product(terms="index", inputs=t, cotangents=t * width, size=size * width)
    if not draw(st.booleans()):
        return ids, None

    def head(net: Network) -> None:
        *lead, c = net.shape
        s = math.prod(lead)
        if c != width:
            dense_to = net.rng.standard_normal((c, width)) / math.sqrt(c)
            net.add("fixed", lambda p, x: x @ dense_to, (*lead, width))
        net.steps.append(lambda params, x: jnp.tanh(x) @ params[block]["table"].T)
        net.shape = (*lead, size)
        net.leaves[f"{block}/table"] = Product(
            terms="dot+index", inputs=t + s * width, cotangents=t * width + s * size, size=size * width
        )

    return ids, head


# ---------------------------------------------------------------------------------------------------------------- tests


def summaries(y: Any, k: int) -> Any:
    """k outputs of any array."""
    flat = jnp.tanh(jnp.ravel(y))
    weights = jnp.arange(1, flat.size + 1) / flat.size
    return jnp.stack([flat.sum(), (flat * weights).sum(), (flat**2 + flat).sum()][:k])


def truth(apply: Any, params: Any, inputs: np.ndarray) -> np.ndarray:
    """Rows `(N, K, P)` by `jax.jacrev` in float64, leaf by leaf in tree order."""
    with jax.enable_x64(True):
        leaves = jax.tree_util.tree_map(jnp.asarray, params)
        jacobian = jax.jit(jax.jacrev(apply))
        found = [jax.tree_util.tree_leaves(jacobian(leaves, example)) for example in inputs]
    return np.stack([np.concatenate([np.reshape(leaf, (len(leaf), -1)) for leaf in row], -1) for row in found])


def assert_between(found: np.ndarray, exact: np.ndarray, diagonal: np.ndarray | None = None) -> None:
    """Kernels agree relative to `sqrt(G_ii G_jj)`, that of the whole kernel where `exact` is only a part of it."""
    diagonal = np.diag(exact) if diagonal is None else diagonal
    scale = np.sqrt(np.outer(diagonal, diagonal))
    assert np.all(np.abs(found - exact) <= LIMIT * scale)


def check(net: Network, inputs: np.ndarray, k: int, layout: str) -> None:
    def apply(params: Any, x: Any) -> Any:
        return summaries(net.run(params, x), k)

    if not net.params:
        return
    rows = truth(apply, net.params, inputs)
    store = jacstore.build(
        Problem(apply=apply, params=net.params, inputs=inputs), None, dtype="float64", layout=layout, unit_size=2
    )
    found = {leaf.path: "+".join(sorted(term.kind for term in leaf.terms)) for leaf in store.leaves}
    expected = {path: leaf.expected(k, layout) for path, leaf in net.leaves.items()}
    assert found == {path: found[path] if terms is None else terms for path, terms in expected.items()}
    rebuilt = store.array.compute(scheduler="synchronous").reshape(rows.shape)
    assert np.all(np.linalg.norm(rebuilt - rows, axis=-1) <= LIMIT * np.linalg.norm(rows, axis=-1))
    np.testing.assert_allclose(store.norms.sum(-1), np.square(rows).sum(-1), rtol=LIMIT)
    for leaf in store.leaves:
        if not leaf.dense:
            # A plan may form the rows of such small leaves instead.
            held = {name: store.read_operand(name, 0, EXAMPLES) for name in leaf.operands}
            part = rows[..., leaf.offset : leaf.offset + leaf.size].reshape(EXAMPLES * k, -1)
            implicit = products(leaf, held, held, Mode.FULL).reshape(len(part), -1)
            assert_between(implicit, part @ part.T, np.square(rows).sum(-1).ravel())
    flat = rows.reshape(EXAMPLES * k, -1)
    full = flat @ flat.T
    assert_between(jacstore.gram(store, tile=2).array.compute(scheduler="synchronous"), full)
    traces = np.einsum("ikjk->ij", full.reshape(EXAMPLES, k, EXAMPLES, k))
    assert_between(jacstore.gram(store, tile=2, mode="trace").array.compute(scheduler="synchronous"), traces)


@pytest.mark.parametrize("kind", ["sequences", "ids", "images"])
@given(data=st.data())
@settings(max_examples=COUNT, deadline=None, suppress_health_check=list(HealthCheck))
def test_leaves_have_the_terms_of_their_blocks_and_rows_and_kernels_are_jacrevs(kind, data):
    net, inputs = data.draw(networks(kind))
    check(net, inputs, data.draw(st.sampled_from([1, 3])), data.draw(st.sampled_from(["auto", "factored"])))
