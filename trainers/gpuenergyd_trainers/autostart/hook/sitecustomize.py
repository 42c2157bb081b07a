"""The hook that `gpuenergyd run` adds to every Python process; it then runs the sitecustomize that it hides, if any.

The process may use any version of Python, so this file must be valid Python 3.6 (with quoted annotations). It must be
fast and never raise.
"""  # noqa: INP001  Python finds it in this folder by its name, in no package

import os
import sys


class _ProjectFinder:
    """A finder, the last in the list, that finds only this project's packages, in the installation of the command."""

    def __init__(self, roots: "list[str]") -> None:
        self.roots = roots

    def find_spec(self, name: "str", path: "object" = None, target: "object" = None) -> "object":  # noqa: ARG002  as finders are called
        """Return the spec of one of this project's packages; None for any other module."""
        if name not in {"gpuenergyd", "gpuenergyd_trainers"}:
            return None
        from importlib.machinery import PathFinder  # noqa: PLC0415  rarely needed

        return PathFinder.find_spec(name, self.roots)


def _watch() -> None:
    sys.meta_path.append(_ProjectFinder(os.environ.get("GPUENERGYD_HOOK_ROOTS", "").split(os.pathsep)))  # type: ignore[arg-type]  # has what a finder needs
    from gpuenergyd_trainers.autostart.watching import watch  # noqa: PLC0415  found by the finder of the line above

    watch()


def _run_hidden_sitecustomize() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    from importlib.machinery import PathFinder  # noqa: PLC0415  the import system has loaded it

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec  # noqa: PLC0415  only where there is another

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  pathlib would be loaded for nothing else
sys.path[:] = [entry for entry in sys.path if entry != _here]
if sys.version_info >= (3, 11):  # noqa: UP036  any Python runs this file
    try:  # noqa: SIM105  contextlib would be loaded for nothing else
        _watch()
    except Exception:  # noqa: BLE001, S110  the program runs as without the hook
        pass
_run_hidden_sitecustomize()
