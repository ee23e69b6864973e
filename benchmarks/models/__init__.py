"""Training steps of whole models, with each attention."""
