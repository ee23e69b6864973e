"""How near `ds_sparse plan` comes to what was measured, and the rates of an H200 that it comes with."""
