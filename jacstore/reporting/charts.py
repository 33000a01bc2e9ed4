"""Charts as SVG text, and a matrix as a PNG: small functions, no library.

Colours are CSS classes of the page, so that a chart is right in a light and in a dark scheme. A chart is 360 units
wide: about the width of a telephone, and twice that at most elsewhere, so its text can be read on both.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from html import escape

import numpy as np

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 38


def svg(body: str, label: str, height: int = HEIGHT, width: int = WIDTH) -> str:
    """An SVG element that says in words what it shows."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "tick") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def line(points: Sequence[tuple[float, float]], kind: str) -> str:
    """A line through points."""
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" class="{kind}" fill="none"/>'


def power(exponent: int) -> str:
    """A power of ten as a label: 1, 10, 100, 10⁻³."""
    if 0 <= exponent <= 3:
        return f"{10**exponent:,}"
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def powers_between(low: float, high: float, most: int = 6) -> list[int]:
    """Exponents of powers of ten between two positive numbers, at most so many."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    step = max(1, -(-(last - first + 1) // most))
    return list(range(first, last + 1, step))


def _place(value: float, low: float, high: float, start: float, end: float) -> float:
    """Where a number lies on an axis from `low` to `high`, on the logarithmic scale."""
    share = (math.log10(value) - math.log10(low)) / (math.log10(high) - math.log10(low) or 1.0)
    return start + share * (end - start)


def spectrum_chart(eigenvalues: np.ndarray, alphas: Sequence[tuple[float, float]]) -> str:
    """Eigenvalues by rank, both logarithmic, with a line at each (alpha, effective dimension)."""
    positive = eigenvalues[eigenvalues > 0]
    largest = float(positive[0])
    # What lies below rounding says nothing of the kernel.
    shown = positive[positive >= largest * 1e-16]
    low, high, n = float(shown[-1]) / 1.5, largest * 1.5, max(2, len(shown))
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def at(rank: float, value: float) -> tuple[float, float]:
        return _place(rank, 1, n, LEFT, right), _place(value, low, high, bottom, TOP)

    parts = []
    for exponent in powers_between(low, high):
        y = at(1, 10.0**exponent)[1]
        parts += [line([(LEFT, y), (right, y)], "grid"), text(LEFT - 5, y + 3.5, power(exponent), "end")]
    for exponent in powers_between(1, n):
        x = at(10.0**exponent, high)[0]
        parts += [line([(x, TOP), (x, bottom)], "grid"), text(x, bottom + 14, power(exponent))]
    for alpha, dimension in alphas:
        if low < alpha < high:
            y, words = at(1, alpha)[1], f"α = {alpha:.2g}: effective dimension {dimension:,.0f}"
            # The curve is above this line on the left of where it crosses it, and below on the right.
            crossing = at(max(1, int((shown > alpha).sum())), alpha)[0]
            below = crossing > (LEFT + right) / 2
            place = (LEFT + 4, y + 12, words, "start") if below else (right - 2, y - 4, words, "end")
            parts += [line([(LEFT, y), (right, y)], "mark"), text(*place, kind="note")]
    ranks = np.unique(np.geomspace(1, len(shown), 300).round().astype(int))
    parts.append(line([at(rank, float(shown[rank - 1])) for rank in ranks], "curve"))
    parts.append(text((LEFT + right) / 2, HEIGHT - 6, "rank", kind="axis"))
    return svg("".join(parts), f"Eigenvalues by rank, from {largest:.3g} down to {float(shown[-1]):.3g}")


def histogram(values: np.ndarray, label: str, marks: Sequence[float] = ()) -> str:
    """How many values lie where, on a logarithmic axis, with marks for limits."""
    positive = values[np.isfinite(values) & (values > 0)]
    low, high = float(positive.min()) / 1.05, float(positive.max()) * 1.05
    edges = np.geomspace(low, high, 41)
    counts, _ = np.histogram(positive, edges)
    bottom, right, most = HEIGHT - BOTTOM, WIDTH - RIGHT, int(counts.max())
    parts = []
    for part in (0, 0.5, 1):
        y = bottom - part * (bottom - TOP)
        parts += [line([(LEFT, y), (right, y)], "grid"), text(LEFT - 5, y + 3.5, f"{round(part * most):,}", "end")]
    for a, b, count in zip(edges, edges[1:], counts, strict=False):
        x, end = (_place(float(v), low, high, LEFT, right) for v in (a, b))
        height = count / most * (bottom - TOP)
        if count:
            # Few examples far out are what is looked for: a bar of one is never thinner than it can be seen.
            height = max(height, 2.0)
            parts.append(
                f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{max(0.8, end - x - 0.8):.1f}" '
                f'height="{height:.1f}" class="bar"/>'
            )
    for value in marks:
        if low < value < high:
            x = _place(value, low, high, LEFT, right)
            parts.append(line([(x, TOP), (x, bottom)], "mark"))
    for value in _log_ticks(low, high):
        x = _place(value, low, high, LEFT, right)
        parts.append(text(x, bottom + 14, f"{value:.3g}"))
    parts.append(text((LEFT + right) / 2, HEIGHT - 6, label, kind="axis"))
    return svg("".join(parts), f"{label}: from {positive.min():.3g} to {positive.max():.3g}")


def _log_ticks(low: float, high: float) -> list[float]:
    """Some numbers with one figure between two others; their ends where there are none."""
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 4, 5, 6, 7, 8, 9), tuple(n / 10 for n in range(10, 100))):
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [digit * 10.0**exponent for exponent in exponents for digit in digits]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            return found[:: -(-len(found) // 6)]
    return [low, high]


def heat_map(values: np.ndarray, bounds: Sequence[tuple[str, int, int]] = ()) -> str:
    """A matrix of numbers in [-1, 1] as a picture, with the ranges (label, first, last) of ordered rows on the left."""
    n, m = values.shape
    size, left = 300, 30 if bounds else 8
    height = max(60, min(size, round(size * n / m)))
    rows = height / n
    parts = [
        f'<image x="{left}" y="4" width="{size}" height="{height}" preserveAspectRatio="none" class="pixels" '
        f'href="data:image/png;base64,{base64.b64encode(png(colours(values))).decode()}"/>'
    ]
    for label, first, last in bounds:
        top, end = 4 + first * rows, 4 + last * rows
        parts.append(line([(left - 3, top + 0.7), (left - 3, end - 0.7)], "range"))
        if end - top >= 9:
            parts.append(text(left - 7, (top + end) / 2 + 3.5, label, "end"))
    bar = colours(np.linspace(-1, 1, 65)[None])
    y = height + 12
    parts.append(
        f'<image x="{left}" y="{y}" width="{size}" height="8" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{base64.b64encode(png(bar)).decode()}"/>'
    )
    for value in (-1, 0, 1):
        anchor = {-1: "start", 0: "middle", 1: "end"}[value]
        parts.append(text(left + (value + 1) / 2 * size, y + 20, str(value).replace("-", "−"), anchor))
    return svg("".join(parts), f"Heat map of {n} by {m} examples", height + 38, left + size + 8)


# Blue, almost white, red: told apart by people who do not tell red from green.
SCALE = np.array([(33, 80, 160), (120, 170, 215), (245, 245, 242), (230, 145, 110), (165, 30, 45)], float)


def colours(values: np.ndarray) -> np.ndarray:
    """Numbers in [-1, 1] as bytes `(n, m, 3)`; NaN is grey."""
    at = np.linspace(-1, 1, len(SCALE))
    clipped = np.clip(np.nan_to_num(values, nan=0.0), -1, 1)
    found = np.stack([np.interp(clipped, at, SCALE[:, channel]) for channel in range(3)], -1)
    found[~np.isfinite(values)] = 128
    return found.round().astype(np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """A PNG of bytes `(n, m, 3)` (ISO/IEC 15948: signature, IHDR, IDAT, IEND; every row begins with filter 0)."""
    n, m, _ = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    raw = np.concatenate([np.zeros((n, 1), np.uint8), pixels.reshape(n, m * 3)], 1).tobytes()
    header = struct.pack(">IIBBBBB", m, n, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
