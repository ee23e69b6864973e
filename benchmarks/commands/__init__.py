"""The operations that `python -m benchmarks` adds to those of `ds_sparse bench`, a module each."""
