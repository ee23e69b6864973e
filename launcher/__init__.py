"""`ds_sparse run`: training scripts that know nothing of ds_sparse, started through DeepSpeed's launcher.

The way of a run: `command` checks what can be checked and calls DeepSpeed's launcher, which starts `child` as each
worker; `child` becomes the script, with `startup` on PYTHONPATH; the `sitecustomize` there waits for DeepSpeed to be
imported, and `hook` then makes it ours.
"""
