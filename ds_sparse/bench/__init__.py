"""`ds_sparse bench`: what an operation costs beside its peers. Outputs are verified before anything is timed."""
