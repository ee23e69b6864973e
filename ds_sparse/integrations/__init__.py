"""Bindings to training frameworks, which `import ds_sparse` does not import."""
