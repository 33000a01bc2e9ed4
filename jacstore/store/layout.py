"""How a store is cut into units, pieces and files, from its numbers of examples and columns and the memory."""

from __future__ import annotations

from dataclasses import dataclass

from jacstore.base.budget import BUILD, GRAM_SLAB, Budget
from jacstore.base.limits import IO_THREADS, LIMITS, MAX_FILES
from jacstore.errors import InvalidRequestError

PIECE_BYTES = 1_000_000
UNIT_BYTES = 1_000_000_000
# Units in memory while one is written and the next computed.
UNITS_ALIVE = 2


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of the kernel: a store's examples, cut by its units and by the kernel's tiles."""

    n_examples: int
    unit_size: int
    piece_columns: int
    itemsize: int

    def tiles(self, tile: int) -> int:
        return -(-self.n_examples // tile)

    def examples(self, tile: int, first: int, last: int) -> tuple[int, int]:
        """Examples of tiles first to last - 1."""
        return min(first * tile, self.n_examples), min(last * tile, self.n_examples)

    def examples_read(self, start: int, stop: int) -> int:
        """Examples of the units that the range touches: a piece is read whole."""
        if start >= stop:
            return 0
        first = start // self.unit_size * self.unit_size
        last = min(-(-stop // self.unit_size) * self.unit_size, self.n_examples)
        return last - first

    def columns_read(self, start: int, stop: int, n_columns: int) -> int:
        """Columns of the pieces that the range touches."""
        first = start // self.piece_columns * self.piece_columns
        return min(-(-stop // self.piece_columns) * self.piece_columns, n_columns) - first


@dataclass(frozen=True, kw_only=True)
class StorePlan:
    """How `(N, K, P_dense)` rows are cut: `unit_size` examples per unit, `piece_columns` per piece, pieces per file.

    Each example has `factor_bytes` bytes of factors; `n_columns` is 0 where all leaves are factored.
    """

    n_examples: int
    n_outputs: int
    n_columns: int
    itemsize: int
    unit_size: int
    piece_columns: int
    pieces_per_file: int
    factor_bytes: int = 0
    factor_files: int = 0

    @property
    def n_units(self) -> int:
        return -(-self.n_examples // self.unit_size)

    @property
    def n_files(self) -> int:
        """Files of rows, factors, outputs and norms, and records."""
        rows = -(-self.n_columns // (self.piece_columns * self.pieces_per_file))
        return self.n_units * (rows + self.factor_files + 3)

    @property
    def bytes_rows(self) -> int:
        """Bytes of the rows, not compressed."""
        return self.n_examples * self.n_outputs * self.n_columns * self.itemsize

    @property
    def bytes_stored(self) -> int:
        """Bytes of rows and factors, not compressed."""
        return self.bytes_rows + self.n_examples * self.factor_bytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit's rows and factors in memory."""
        return self.unit_size * (self.n_outputs * self.n_columns * self.itemsize + self.factor_bytes)


def plan_store(
    *,
    n_examples: int,
    n_outputs: int,
    n_columns: int,
    itemsize: int,
    memory: int,
    unit_size: int | None = None,
    factor_bytes: int = 0,
    factor_files: int = 0,
) -> StorePlan:
    """Choose unit, piece and file sizes.

    Two units take the memory's part `unit_buffers`: one is written while the next is computed. A piece spans all rows
    of its unit and few enough columns that a slab of all N*K rows, one piece wide, is small.
    """
    example_bytes = n_outputs * n_columns * itemsize
    budget = Budget(memory).split(**BUILD)
    if unit_size is None:
        largest = max(1, min(budget["unit_buffers"] // UNITS_ALIVE, UNIT_BYTES) // (example_bytes + factor_bytes))
        unit_size = even(n_examples, min(largest, max(1, -(-n_examples // 8))))
    unit_size = min(unit_size, n_examples)
    n_columns_or_one = max(1, n_columns)
    by_slab = Budget(memory).split(**GRAM_SLAB)["slab"] // (n_examples * n_outputs * itemsize)
    by_piece = PIECE_BYTES // (unit_size * n_outputs * itemsize)
    columns = min(max(min(by_slab, by_piece), LIMITS.piece_columns[0]), LIMITS.piece_columns[1], n_columns_or_one)
    columns = even(n_columns_or_one, columns)
    total = n_examples * example_bytes
    file_bytes = max(LIMITS.file_bytes, total // (MAX_FILES // 2))
    pieces = max(1, -(-n_columns // columns))
    files = max(1, -(-unit_size * example_bytes // file_bytes))
    rounded = -(-files // IO_THREADS) * IO_THREADS
    if 1 < files < pieces and rounded * -(-n_examples // unit_size) <= MAX_FILES // 2:
        # The files of a unit are written several at a time; a single last file would leave the disk half idle.
        files = rounded
    per_file = -(-pieces // min(files, pieces))
    plan = StorePlan(
        n_examples=n_examples,
        n_outputs=n_outputs,
        n_columns=n_columns,
        itemsize=itemsize,
        unit_size=unit_size,
        piece_columns=columns,
        pieces_per_file=per_file,
        factor_bytes=factor_bytes,
        factor_files=factor_files,
    )
    if plan.n_files > 4 * MAX_FILES:
        raise InvalidRequestError(
            f"units of {unit_size} examples would make {plan.n_files:,} files; at most {4 * MAX_FILES:,} are allowed: "
            "give a larger --unit-size (unit_size=)"
        )
    return plan


def even(total: int, at_most: int) -> int:
    """The size that cuts `total` into as few parts as `at_most` does, as evenly as it can."""
    return -(-total // (-(-total // at_most)))
