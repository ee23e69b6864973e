"""Imported by each Python that `ds_sparse run` starts: makes DeepSpeed ours when the program imports it, if it does.

Standard library alone, so that it costs nothing in the other Pythons of a shell script, which may have no ds_sparse.
"""

import atexit
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from os.path import dirname, realpath


class AfterDeepSpeed(MetaPathFinder):
    """Finds `deepspeed` where the others do, and has `ds_sparse.launcher.hook` run after it."""

    def find_spec(self, name, path=None, target=None):
        if name != "deepspeed":
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_hook(module):
                execute(module)
                try:
                    from ds_sparse.launcher import hook

                    hook.install(module)
                except ImportError as error:
                    # Programs go on without DeepSpeed where its import fails by an ImportError.
                    raise RuntimeError(f"ds_sparse run: {sys.executable} cannot import ds_sparse: {error}") from error

            spec.loader.exec_module = execute_and_hook  # type: ignore[method-assign]
        return spec


def say_if_the_flag_had_no_effect() -> None:
    """One line of the first worker, where the program was to be sparse and has come to its end without what makes it
    so. One that an exception ended has said why."""
    if getattr(sys, "last_value", None) is not None:
        return
    seen = [os.environ.get(name) for name in ("DS_SPARSE_RUN", "DS_SPARSE_WORKER", "RANK")]
    if seen == ["sparse", str(os.getpid()), "0"] and "ds_sparse.integrations.deepspeed" not in sys.modules:
        print(
            "ds_sparse: --deepspeed_sparse_attention has had no effect: the program ended without "
            "deepspeed.initialize.",
            flush=True,
        )


def import_the_next() -> None:
    """Runs the sitecustomize that this one stands before, if there is one."""
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, AfterDeepSpeed())
atexit.register(say_if_the_flag_had_no_effect)
sys.path[:] = [folder for folder in sys.path if realpath(folder) != dirname(realpath(__file__))]
import_the_next()
