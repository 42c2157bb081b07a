"""Tells when a module that somebody waits for has been imported; costs the other imports a dictionary look-up.

Loaded at the start of every Python of a program, whatever it is: imports next to nothing.
"""

import importlib.machinery
import sys
from types import ModuleType

WATCHED = {
    "torch.distributed.pipelining.schedules": "join_pipeline_schedules",
    "deepspeed.runtime.pipe.engine": "join_pipeline_engines",
    "lightning.pytorch.trainer.trainer": "join_lightning_trainers",
    "pytorch_lightning.trainer.trainer": "join_lightning_trainers",
    "transformers.trainer": "join_huggingface_trainers",
}
"""Modules, and what `joining` does to them."""


class Watcher:
    """A finder that finds nothing itself: it lets the others find, and has the loader call us afterwards."""

    def __init__(self) -> None:
        self._is_asking = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Return a watched module's spec; None for every other."""
        if name not in WATCHED or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = _found_by_others(self, name, path, target)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            _call_after_loading(spec.loader, WATCHED[name])
        return spec


def watch() -> None:
    """Begin to watch imports, once."""
    if not any(isinstance(finder, Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, Watcher())


def _found_by_others(
    watcher: Watcher, name: str, path: object, target: object
) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if finder is not watcher and find_spec is not None:
            spec: importlib.machinery.ModuleSpec | None = find_spec(name, path, target)
            if spec is not None:
                return spec
    return None


def _call_after_loading(loader: object, what: str) -> None:
    """Shadow the loader's method on this one loader, which loads this one module; a loader that forbids it is left."""
    execute = loader.exec_module  # type: ignore[attr-defined]  # every loader of today has it

    def execute_and_tell(module: ModuleType) -> None:
        del loader.exec_module  # type: ignore[attr-defined]  # as above
        execute(module)
        try:
            from gpuenergyd_trainers.autostart import joining  # noqa: PLC0415  only where a framework is in use

            getattr(joining, what)(module)
        except Exception as error:  # noqa: BLE001  never into an import
            sys.stderr.write(f"gpuenergyd: {module.__name__} is left as it is: {error!r}\n")

    try:
        loader.exec_module = execute_and_tell  # type: ignore[attr-defined]  # as above
    except AttributeError:
        sys.stderr.write(f"gpuenergyd: {type(loader).__name__} cannot be watched; the program is left as it is\n")
