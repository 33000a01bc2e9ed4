"""Names and numbers that several parts of the package share, and in `LIMITS` those that tests change."""

from dataclasses import dataclass

PRECISIONS = ("float64", "float32", "bf16x9", "bf16x6", "bf16x3", "tf32", "fast")
BLAS_PRECISIONS = ("float64", "float32")
# What a store holds its rows as, and how its chunks may be compressed.
DTYPES = ("float32", "bfloat16", "float16", "float64")
CODECS = ("none", "lz4", "zstd")
MAX_FILES = 20_000
MAX_ITEMS = 10_000
IO_THREADS = 4
# Bytes free where nothing limits them.
UNLIMITED = 2**62
# Products of pairs of positions are formed in blocks of about this size, several at once.
PRODUCT_BYTES = 2_000_000


@dataclass(kw_only=True, slots=True)
class Limits:
    """Sizes, shares and times that decide how work is cut up, what is stored how, and what counts as dead.

    There is one value, `LIMITS`, whose fields are read whenever they are needed. Nothing in jacstore changes them;
    tests do, to see on small problems what happens on large ones.
    """

    # --- rows and stores
    # Rows of smaller leaves stand side by side in one array; as factors each would take files of its own.
    smallest_factored: int = 1024
    # Columns of a piece at least and at most, and bytes of a file: one of 64 MB keeps 300 GB within 5,000 files.
    piece_columns: tuple[int, int] = (64, 2048)
    file_bytes: int = 64_000_000
    # Seconds of a device pass that is not timed twice.
    long_run_seconds: float = 0.2
    # Share of a unit's time that checking its rows may take; one example is always checked.
    check_share: float = 0.02
    # The same for modules of PyTorch, with a number of seconds that nobody notices, and how many examples are compared
    # at most before it is known how long one takes.
    audit_share: float = 0.04
    audit_unnoticed_seconds: float = 0.5
    audit_first: int = 64
    # Bytes of arrays that a program kept for the next build may close over.
    kept_constants_bytes: int = 64_000_000

    # What one request reads of an object in a bucket, or one chunk if that is more; 32 of them are in memory at once.
    window_bytes: int = 16_000_000

    # --- kernels and products
    # Wide slabs keep BLAS busy; beyond this depth a float32 product would lose digits before its float64 sum.
    slab_columns: int = 4096
    # Rows that are formed from factors take about this much at once, or one channel of cotangents if that is more.
    expanded_bytes: int = 32_000_000
    # Channels of a slab of such rows, if there are as many: narrower products are slow.
    expanded_channels: int = 256
    # Least and most rows of the blocks that a product of slabs is cut into. Each is multiplied by one thread and added
    # while it is in the cache; of smaller ones BLAS would copy the operands too often.
    slab_block: tuple[int, int] = (256, 512)
    # In products with factors: numbers of intermediate products of a few examples at a time; channels times columns in
    # one product, of which more gain no speed and leave fewer examples; examples times positions that are summed in the
    # products' own type before they are added in float64.
    product_numbers: int = 4_000_000
    product_width: int = 2048
    product_depth: int = 4096
    # Columns that go through one program together when the function is differentiated: their tangents and cotangents
    # are alive at once.
    columns_together: int = 16
    # Rows that are formed at once for the matrix Jᵀ Λ J, since a float32 sum over more would lose digits, and columns
    # of it that are added at once.
    ggn_rows: int = 4096
    ggn_columns: int = 1024

    # --- factorizations
    # SciPy's LAPACK keeps the interpreter while it runs, so that no signal is handled before it returns: it gets blocks
    # of a fraction of a second, and NumPy's matrix products, which let the interpreter go, do the rest. Blocks also
    # keep clear of OpenBLAS up to 0.3.31, which ends the process in a threaded potrf of more than 15,000 rows on two
    # cores.
    cholesky_rows: int = 1024
    cholesky_columns: int = 4096
    # The workspace of LAPACK's divide and conquer, 1 + 6 R + 2 R², leaves 32 bits beyond this many rows.
    lapack_32_bit_rows: int = 32_766
    # Edge of the squares in which factorizations are kept beside a kernel.
    kept_square: int = 2048

    # --- locks, checkpoints, progress
    # A lock of another host is dead after this long without a heartbeat, watched here: clocks of two hosts may differ.
    lock_stale_seconds: float = 60.0
    # So is a guard file of another host, or one that its maker has not filled.
    guard_stale_seconds: float = 60.0
    # Between two changes of a lock by which its owner says that it lives.
    heartbeat_seconds: float = 5.0
    # Between two tries for the guard object of a bucket.
    bucket_pause_seconds: float = 0.1
    # What is larger is put in parts of this size, a few at a time.
    bucket_part_bytes: int = 256 * 2**20
    # How long an interrupted run waits for its workers to save what they have; one that stands still may not come back.
    ending_seconds: float = 60.0
    # Checkpoints may take this share of the time; a kill then loses at most their cost divided by it.
    checkpoint_share: float = 0.05
    # Assumed speed of writing the first checkpoint, in bytes per second, until one has been timed.
    checkpoint_speed: float = 3e8
    # Rows of a kernel that a report reads for its spectrum.
    report_rows: int = 2_000
    # Between two lines of progress where there is no terminal.
    progress_seconds: float = 5.0


LIMITS = Limits()
