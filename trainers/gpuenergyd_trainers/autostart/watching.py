"""An import hook that patches supported frameworks when they are imported.

It is loaded at the start of every Python process of a program. So it imports very little, and costs other imports only
one dictionary look-up.
"""

import importlib.machinery
import os
import sys
from types import ModuleType

WATCHED = {
    "torch.distributed.pipelining.schedules": "join_pipeline_schedules",
    "deepspeed.runtime.pipe.engine": "join_pipeline_engines",
    "megatron.core.pipeline_parallel.schedules": "join_megatron_schedules",
    "lightning.pytorch.trainer.trainer": "join_lightning_trainers",
    "pytorch_lightning.trainer.trainer": "join_lightning_trainers",
    "transformers.trainer": "join_huggingface_trainers",
    "torch.optim.optimizer": "join_plain_loops",
}
"""Modules to patch, with the functions of `joining` that patch them."""


class Watcher:
    """A finder that uses the other finders, and patches a watched module after its loader has run."""

    def __init__(self) -> None:
        self._is_delegating = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a watched module; None for any other module."""
        if name not in WATCHED or self._is_delegating:
            return None
        self._is_delegating = True
        try:
            spec = _delegate(self, name, path, target)
        finally:
            self._is_delegating = False
        if spec is not None and spec.loader is not None:
            _patch_after_loading(spec.loader, WATCHED[name])
        return spec


def watch() -> None:
    """Install the finder, once per process."""
    if not any(isinstance(finder, Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, Watcher())
    if os.environ.get("GPUENERGYD_RUN_MARK", "").startswith(f"{os.getpid()}:"):
        from gpuenergyd.client.run_mark import watch_for_ranks  # noqa: PLC0415  only in the program's first process

        watch_for_ranks()


def _delegate(watcher: Watcher, name: str, path: object, target: object) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if finder is not watcher and find_spec is not None:
            spec: importlib.machinery.ModuleSpec | None = find_spec(name, path, target)
            if spec is not None:
                return spec
    return None


def _patch_after_loading(loader: object, patch_name: str) -> None:
    """Wrap `exec_module` on this loader instance only, which loads only this module."""
    execute = loader.exec_module  # type: ignore[attr-defined]  # every current loader has it

    def execute_and_patch(module: ModuleType) -> None:
        del loader.exec_module  # type: ignore[attr-defined]  # as above
        execute(module)
        try:
            from gpuenergyd_trainers.autostart import joining  # noqa: PLC0415  only where a framework is in use

            getattr(joining, patch_name)(module)
        except Exception as error:  # noqa: BLE001  never raise into an import
            sys.stderr.write(
                f"gpuenergyd: cannot patch {module.__name__}; training continues at full speed: {error!r}\n"
            )

    try:
        loader.exec_module = execute_and_patch  # type: ignore[attr-defined]  # as above
    except AttributeError:
        sys.stderr.write(f"gpuenergyd: unsupported loader {type(loader).__name__}; training continues at full speed\n")
