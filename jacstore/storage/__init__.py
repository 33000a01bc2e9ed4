"""Bytes that last: files, chunks, records and locks.

`files` puts bytes in place as a whole, `buckets` does the same in S3, GCS and Azure, `exclusive` and `ledger` hold
locks and records, `chunks` encode arrays into files, `zarr_group` creates and opens the Zarr group around them,
`checkpoints`, `kept_arrays` and `sample_files` keep what is computed on the way, `runs` what past runs said of
themselves, and `indexing` says what an index of a lazy array reads. What the numbers mean is not known here.
"""
