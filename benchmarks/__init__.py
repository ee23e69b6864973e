"""Benchmarks of a clone: models with each attention, training to a quality, and peers that other packages bring.

    python -m benchmarks OPERATION ...

takes what `ds_sparse bench` takes, with more operations and peers, and shows all results of `benchmarks/results`.
"""
