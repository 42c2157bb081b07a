"""Runs a module that is terminated when its parent dies, even by SIGKILL: `with_parent PID MODULE ARGUMENT...`."""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Request SIGTERM from the kernel at the parent's death, then run the module."""
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # the parent died before the call above
        sys.exit(128 + signal.SIGTERM)
    del sys.argv[:2]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
