"""Names and numbers that several parts of the package share: modes, precisions, caps, sizes of blocks."""

PRECISIONS = ("float64", "float32", "bf16x9", "bf16x6", "bf16x3", "tf32", "fast")
BLAS_PRECISIONS = ("float64", "float32")
# What a store holds its rows as, and how its chunks may be compressed.
DTYPES = ("float32", "bfloat16", "float16", "float64")
CODECS = ("none", "lz4", "zstd")
MAX_FILES = 20_000
MAX_ITEMS = 10_000
# Wide slabs keep BLAS busy; beyond this depth a float32 product would lose digits before its float64 sum.
SLAB_COLUMNS = 4096
IO_THREADS = 4
# Bytes free where nothing limits them.
UNLIMITED = 2**62
# What is read of an object in a bucket by one request, or one chunk if that is more: 32 of them are in memory at once.
WINDOW_BYTES = 16_000_000
# Products of pairs of positions are formed in blocks of about this size, several at once.
PRODUCT_BYTES = 2_000_000
# Rows that are formed from factors take about this much at once, or one channel of cotangents if that is more.
EXPANDED_BYTES = 32_000_000
