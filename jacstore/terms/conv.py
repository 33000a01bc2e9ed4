"""A product of patches of images and cotangents: filters of convolutions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jacstore.base.schema import Signed
from jacstore.terms.dot import Dot
from jacstore.terms.term import Factored, Operands, Shapes, Views, positions_first


@dataclass(frozen=True, kw_only=True)
class Conv(Factored):
    """A product of patches of images `(n, B, *space, C)` and cotangents at T = B * positions; patches are not stored.

    Entry w of the window meets position t at input `t * strides + w * dilation - padding` of the image, whose pixels
    stand `spread` apart. Its block is `(n, K, *window, C / groups, D)`.
    """

    kind: ClassVar[str] = "conv"
    # A slab's expansion needs all positions of examples.
    smaller_by: ClassVar[int] = 2
    # XLA is slow at filter gradients of single examples; shifted images are multiplied instead.
    from_factors: ClassVar[bool] = True
    in_verify: ClassVar[bool] = False
    inputs: str
    cotangents: str
    scale: float
    views: Views
    window: tuple[int, ...]
    positions: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[Signed, ...]
    spread: tuple[int, ...]
    groups: int

    @property
    def source(self) -> str | None:
        return self.inputs

    def renamed(self, names: Mapping[str, str]) -> Self:
        return self.changed(inputs=names[self.inputs], cotangents=names[self.cotangents])

    @property
    def geometry(self) -> tuple[Any, ...]:
        return tuple({**vars(self), "inputs": None, "cotangents": None}.items())

    def contradiction(self, shapes: Shapes) -> str | None:
        images, cotangents = shapes[self.inputs], shapes[self.cotangents]
        along = (self.window, self.positions, self.strides, self.dilation, self.padding, self.spread)
        if any(len(numbers) != len(images) - 2 for numbers in along):
            return "have its geometry along every axis"
        if min((*self.window, *self.positions, *self.strides, *self.dilation, *self.spread, self.groups)) < 1:
            return "have a geometry of positive numbers"
        fits = (
            len(cotangents) == 3
            and cotangents[:2] == (1, images[0] * math.prod(self.positions))
            and images[-1] % self.groups == cotangents[-1] % self.groups == 0
        )
        return None if fits else "have the positions and channels of its operands"

    # ----------------------------------------------------------------------------------------------------------- rows

    def padded(self, images: Any, xp: Any = np) -> Any:
        """Images `(n, B, *space, C)` with zeros around and between pixels, so that patches are plain slices."""
        for axis, (low, apart) in enumerate(zip(self.padding, self.spread, strict=True), start=2):
            if apart > 1:
                spaced = xp.stack([images, *[xp.zeros_like(images)] * (apart - 1)], axis + 1)
                shape = (*images.shape[:axis], images.shape[axis] * apart, *images.shape[axis + 1 :])
                last = (images.shape[axis] - 1) * apart + 1
                images = xp.take(spaced.reshape(shape), xp.arange(last), axis)
            if low < 0:
                images = images[(slice(None),) * axis + (slice(-low, None),)]
            needed = (self.positions[axis - 2] - 1) * self.strides[axis - 2] + 1
            needed += (self.window[axis - 2] - 1) * self.dilation[axis - 2]
            missing = needed - images.shape[axis] - max(low, 0)
            around = [(0, 0)] * images.ndim
            around[axis] = (max(low, 0), max(missing, 0))
            images = xp.pad(images, around)
            if missing < 0:
                images = images[(slice(None),) * axis + (slice(0, needed),)]
        return images

    def slices(self, entry: tuple[int, ...]) -> tuple[slice, ...]:
        """Where in a padded image the positions are that a window's entry meets."""
        return tuple(
            slice(w * d, w * d + (t - 1) * s + 1, s)
            for w, d, t, s in zip(entry, self.dilation, self.positions, self.strides, strict=True)
        )

    def patches(self, images: Any, xp: Any = np) -> Any:
        """Patches `(n, 1, T, window * C)` of images, for a convolution without groups."""
        padded = self.padded(images, xp)
        n, channels = len(images), images.shape[-1]
        count = images.shape[1] * math.prod(self.positions)
        cut = [padded[(slice(None), slice(None), *self.slices(entry))] for entry in np.ndindex(*self.window)]
        return xp.stack([patch.reshape(n, count, channels) for patch in cut], 2).reshape(n, 1, count, -1)

    def block(self, operands: Operands, xp: Any = np) -> Any:
        images, d = self.padded(operands[self.inputs], xp), operands[self.cotangents][:, :, 0]
        n, channels = len(images), images.shape[-1]
        k, t, width = d.shape[1:]
        grouped = d.reshape(n, k, t, self.groups, width // self.groups).swapaxes(2, 3)
        parts = []
        for entry in np.ndindex(*self.window):
            patch = images[(slice(None), slice(None), *self.slices(entry))]
            patch = patch.reshape(n, t, self.groups, channels // self.groups).transpose(0, 2, 3, 1)
            # (n, k, groups, channels / groups, width / groups)
            part = xp.matmul(patch[:, None], grouped)
            parts.append(part.swapaxes(2, 3).reshape(n, k, channels // self.groups, width))
        return xp.stack(parts, 2).reshape(n, k, *self.window, channels // self.groups, width)

    def rows_in_torch(self, operands: Operands, torch: Any) -> Any:
        """Rows of a filter `(width, channels / groups, *window)`."""
        images, d = operands[self.inputs], operands[self.cotangents][:, :, 0]
        n, k, t, width = d.shape
        groups = self.groups
        reaches = [(w - 1) * apart + 1 for w, apart in zip(self.window, self.dilation, strict=True)]
        pads: list[int] = []
        for low, size, count, stride, reach in reversed(
            list(zip(self.padding, images.shape[2:-1], self.positions, self.strides, reaches, strict=True))
        ):
            pads += [low, (count - 1) * stride + reach - size - low]
        patches = torch.nn.functional.pad(images, (0, 0, *pads))
        for axis, (reach, stride, apart) in enumerate(zip(reaches, self.strides, self.dilation, strict=True), start=2):
            patches = patches.unfold(axis, reach, stride)[..., ::apart]
        # (n, B, *positions, channels, *window) as (n, groups, channels / groups * window, T)
        patches = patches.reshape(n, t, groups, -1).permute(0, 2, 3, 1)
        columns = d.reshape(n, k, t, groups, width // groups).permute(0, 3, 2, 1, 4).reshape(n, groups, t, -1)
        block = (patches @ columns).reshape(n, groups, -1, math.prod(self.window), k, width // groups)
        return block.permute(0, 4, 1, 5, 2, 3).reshape(n, k, -1)

    def of_patches(self) -> Factored:
        """A convolution without groups as the product of its patches with cotangents."""
        return Dot(inputs=f"patches of {self.inputs}", cotangents=self.cotangents, scale=self.scale, views=())

    def patch_operands(self, operands: Operands) -> Operands:
        return {f"patches of {self.inputs}": self.patches(operands[self.inputs])}

    def input_columns(self, operands: Operands) -> int | None:
        return math.prod(self.window) * operands[self.inputs].shape[-1] if self.in_slabs else None

    def some_inputs(self, operands: Operands, first: int, last: int) -> Any:
        """Columns of patches, of which none but these are cut."""
        term, images = self._unspread(), operands[self.inputs]
        images = images if term is self else self.padded(images)
        channels = images.shape[-1]
        cut = np.zeros((*images.shape[:2], *self.positions, last - first), images.dtype)
        for number, entry in enumerate(np.ndindex(*self.window)):
            a, b = max(first, number * channels), min(last, (number + 1) * channels)
            if a >= b:
                continue
            pairs = [term._met(axis, w, images.shape[axis + 2]) for axis, w in enumerate(entry)]
            to, source = ((slice(None), slice(None), *(pair[end] for pair in pairs)) for end in (0, 1))
            place = number * channels
            cut[(*to, slice(a - first, b - first))] = images[(*source, slice(a - place, b - place))]
        return cut.reshape(len(images), -1, last - first)

    # ---------------------------------------------------------------------------------------------- products of pairs

    def n_groups(self, cotangents: Any) -> int:
        return self.groups

    def inside(self, other: Self, left: Operands, right: Operands, group: int, xp: Any) -> Any:
        if self.by_patches(left[self.inputs].shape[1:]):
            a, b = (t._patch_group(side[t.inputs], group, xp) for t, side in ((self, left), (other, right)))
            return positions_first(a.transpose(1, 0, 2), b.transpose(1, 0, 2), xp)
        images, others = (t._image_group(side[t.inputs], group, xp) for t, side in ((self, left), (other, right)))
        if xp is np:
            # Nobody else holds the products of pixels, so that they are gone when one axis has been summed.
            return self._unspread()._axis_by_axis(
                images.shape[1:-1], positions_first(_pixels_first(images), _pixels_first(others), xp)
            )
        pixels = positions_first(_pixels_first(images), _pixels_first(others), xp)
        return self._unspread()._over_window(images.shape[1:-1], pixels, xp)

    def own_inside(self, other: Self, operands: Operands, group: int, xp: Any) -> Any:
        if self.by_patches(operands[self.inputs].shape[1:]):
            a, b = (t._patch_group(operands[t.inputs], group, xp) for t in (self, other))
            return xp.matmul(a, xp.swapaxes(b, -1, -2))
        images, others = (self._image_group(operands[t.inputs], group, xp) for t in (self, other))
        flat, beside = (i.reshape(len(i), -1, i.shape[-1]) for i in (images, others))
        pixels = xp.moveaxis(xp.matmul(flat, xp.swapaxes(beside, -1, -2)), 0, -1)
        return xp.moveaxis(self._unspread()._over_window(images.shape[1:-1], pixels, xp), -1, 0)

    def _unspread(self) -> Self:
        """The convolution of images that have been padded because their pixels stand apart."""
        if all(apart == 1 for apart in self.spread):
            return self
        return self.changed(spread=(1,) * len(self.spread), padding=(0,) * len(self.padding))

    def _image_group(self, images: Any, group: int, xp: Any) -> Any:
        images = self.padded(images, xp) if any(apart > 1 for apart in self.spread) else images
        size = images.shape[-1] // self.groups
        return images[..., group * size : (group + 1) * size]

    def _patch_group(self, images: Any, group: int, xp: Any) -> Any:
        """Patches `(n, T, window * C)` of one group's channels."""
        size = images.shape[-1] // self.groups
        return self.patches(images[..., group * size : (group + 1) * size], xp)[:, 0]

    def _over_window(self, shape: tuple[int, ...], pixels: Any, xp: Any) -> Any:
        """Products of patches `(T, T, ...)` from products of pixels `(P, P, ...)` of images `(B, *space)`.

        Each entry of the window adds the products of the pixels that it meets; outside the image is nothing to add.
        """
        batch, space = shape[0], shape[1:]
        rest = pixels.shape[2:]
        pixels = pixels.reshape(*shape, *shape, *rest)
        count = batch * math.prod(self.positions)
        total = xp.zeros((batch, *self.positions, batch, *self.positions, *rest), pixels.dtype)
        for entry in np.ndindex(*self.window):
            to: list[slice] = [slice(None)]
            source: list[slice] = [slice(None)]
            for w, size, positions, stride, dilation, padding in zip(
                entry, space, self.positions, self.strides, self.dilation, self.padding, strict=True
            ):
                shift = w * dilation - padding
                first = max(0, -(shift // stride))
                last = min(positions, (size - 1 - shift) // stride + 1)
                to.append(slice(first, max(first, last)))
                source.append(slice(first * stride + shift, (max(first, last) - 1) * stride + shift + 1, stride))
            if any(part.start >= part.stop for part in to[1:]):
                continue
            places, pairs = (*to, *to), (*source, *source)
            if xp is np:
                total[places] += pixels[pairs]
            else:
                total = total.at[places].add(pixels[pairs])
        return total.reshape(count, count, *rest)

    def _axis_by_axis(self, shape: tuple[int, ...], pixels: np.ndarray) -> np.ndarray:
        """As `_over_window`: a sum over a window is one along each of its axes after the other.

        Numbers keep the order in which they stand in memory, so that runs of pairs of examples stay whole.
        """
        rest, axes = pixels.shape[2:], len(shape)
        pixels = pixels.reshape(*shape, *shape, *rest)
        for axis, positions in enumerate(self.positions):
            places = (axis + 1, axis + 1 + axes)
            size = [positions if place in places else length for place, length in enumerate(pixels.shape)]
            total = np.empty_like(pixels, shape=size)
            pairs = [self._met(axis, w, shape[axis + 1]) for w in range(self.window[axis])]
            # The one that meets most of the pixels is copied, so that nothing need be added to zeros.
            pairs.sort(key=lambda pair: pair[0].start - pair[0].stop)
            for number, pair in enumerate(pairs):
                to, source = (
                    tuple(part if place in places else slice(None) for place in range(pixels.ndim)) for part in pair
                )
                if number:
                    total[to] += pixels[source]
                    continue
                if pair[0] != slice(0, positions):
                    total.fill(0)
                total[to] = pixels[source]
            pixels = total
        count = shape[0] * math.prod(self.positions)
        return pixels.reshape(count, count, *rest)

    def _met(self, axis: int, w: int, size: int) -> tuple[slice, slice]:
        """The positions at which place `w` of the window lies inside an image of this size, and the pixels there."""
        stride, shift = self.strides[axis], w * self.dilation[axis] - self.padding[axis]
        first = min(max(0, -(shift // stride)), self.positions[axis])
        last = max(first, min(self.positions[axis], (size - 1 - shift) // stride + 1))
        start = first * stride + shift
        return slice(first, last), slice(
            start, start + (last - first - 1) * stride + 1 if last > first else start, stride
        )

    # ---------------------------------------------------------------------------------------------- costs and memory

    def by_patches(self, shape: tuple[int, ...]) -> bool:
        """Whether products of patches of images `(B, *space, C)` take less than those of pixels."""
        positions, pixels = self._positions_and_pixels(shape)
        channels, window = shape[-1] // self.groups, math.prod(self.window)
        if positions >= pixels or positions * (window * channels + positions) > pixels**2:
            return False
        return positions**2 * window * channels <= pixels**2 * channels + positions**2 * window

    def _positions_and_pixels(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Places of the window, and pixels, with those that are put between them, of images `(B, *space, C)`."""
        space = ((size - 1) * apart + 1 for size, apart in zip(shape[1:-1], self.spread, strict=True))
        return shape[0] * math.prod(self.positions), shape[0] * math.prod(space)

    def inside_flops(self, other: Self, shapes: Shapes, elementwise: int) -> int | None:
        t, s = shapes[self.cotangents][1], shapes[other.cotangents][1]
        *space, channels = shapes[self.inputs]
        window = math.prod(self.window)
        if self.by_patches(shapes[self.inputs]):
            return 2 * t * s * window * channels
        # Sums over the window are formed along one axis after the other.
        return 2 * math.prod(space) ** 2 * channels + elementwise * self.groups * t * s * sum(self.window)

    def own_flops(self, shapes: Shapes) -> int:
        t, width = shapes[self.cotangents][1:]
        shape, window = shapes[self.inputs], math.prod(self.window)
        channels, pixels = shape[-1], self._positions_and_pixels(shape)[1]
        inside = t * t * window * channels if self.by_patches(shape) else pixels**2 * channels + t * t * window
        return inside + t * t * width

    @property
    def in_slabs(self) -> bool:
        return self.groups == 1

    def pair_numbers(self, shapes: Shapes) -> int:
        """Also of the patches."""
        shape = shapes[self.inputs]
        positions, pixels = self._positions_and_pixels(shape)
        if not self.by_patches(shape):
            return pixels**2 + positions**2
        return positions**2 + 2 * positions * math.prod(self.window) * (shape[-1] // self.groups)

    def most_positions(self, shapes: Shapes) -> int:
        return max(shapes[self.cotangents][1], math.isqrt(self.pair_numbers(shapes)) + 1)

    def patch_positions(self, shapes: Shapes) -> int:
        return shapes[self.cotangents][1]

    # ----------------------------------------------------------------------------------------- products with columns

    def matrix_form(self, shapes: Shapes) -> tuple[tuple[int, int, int], Views]:
        groups = self.groups
        inputs, width = shapes[self.inputs][-1] // groups, shapes[self.cotangents][2] // groups
        block = ("reshape", (*self.window, inputs, groups * width))
        moves: Views = (block, *self.views) if groups == 1 else (("transpose", (1, 0, 2)), block, *self.views)
        return (groups, inputs * math.prod(self.window), width), moves

    def copies_inputs(self, groups: int) -> bool:
        return True

    def matrix_inputs(self, inputs: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
        groups, columns, _ = shape
        channels = inputs.shape[-1] // groups
        padded = self.padded(inputs)
        patches = np.empty((*inputs.shape[:2], *self.positions, math.prod(self.window), inputs.shape[-1]), inputs.dtype)
        for number, entry in enumerate(np.ndindex(*self.window)):
            patches[..., number, :] = padded[(slice(None), slice(None), *self.slices(entry))]
        patches = patches.reshape(-1, *self.window, groups, channels)
        return np.moveaxis(patches, -2, 0).reshape(groups, -1, columns)


def _pixels_first(images: Any) -> Any:
    n, channels = len(images), images.shape[-1]
    return images.reshape(n, -1, channels).transpose(1, 0, 2)
