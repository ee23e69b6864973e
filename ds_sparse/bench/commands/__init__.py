"""The operations of `ds_sparse bench`: the options of each, and what is run and printed."""
