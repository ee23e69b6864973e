"""Bindings to training frameworks; nothing here is imported by `import ds_sparse`."""
