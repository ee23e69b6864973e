"""Bindings to training frameworks; `import ds_sparse` imports `on_import` alone, which imports no framework."""
