"""Plans beside measurements, and the rates of an H200 that `ds_sparse plan` comes with."""
