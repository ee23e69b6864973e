"""`ds_sparse verify`: every kernel variant of a machine against its meaning in float64, and against itself."""
