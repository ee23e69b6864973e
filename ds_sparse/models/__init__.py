"""Making models of others sparse: `sparsify`, its families of models, and DeepSpeed's helpers."""
