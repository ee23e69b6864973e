"""`python -m benchmarks train`: the quality that models reach, trained on the same tokens or for the same minutes."""
