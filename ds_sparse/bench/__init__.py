"""`ds_sparse bench`: what an operation costs beside dense attention. Outputs are verified before anything is timed."""
