"""Compiles all kernels into the disk cache: run `python -m gpuenergyd_policies.planning.kernel_cache` when installing.

Otherwise the policy host compiles during the baseline of the first job, which takes 20 s of CPU time.
"""

import sys
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points

from gpuenergyd_policies.planning.averaging import FlowAveraging
from gpuenergyd_policies.planning.compiled import COMPILE_CLOCK, IS_COMPILED, NO_CACHE_FOLDER, cache_folder
from gpuenergyd_policies.planning.frontier import solve, tiny_pipeline
from gpuenergyd_policies.planning.problem import make_problem
from gpuenergyd_policies.planning.switching.segments import SegmentSearch
from gpuenergyd_policies.planning.switching.simulation import simulate_switching


def compile_kernels() -> None:
    """Plan a tiny pipeline in several ways that together call every kernel, those of plugins too."""
    num_stages, deadline_s, latency_s = 2, 1.0, 0.01
    graph, profile = tiny_pipeline(num_stages, 2 * num_stages)
    solved = solve(graph, profile, deadline_s=deadline_s)
    simulate_switching(graph, profile, ((),) * num_stages, latency=latency_s)
    search = SegmentSearch(graph, profile, latency=latency_s)
    search.best(solved, deadline_s=deadline_s, max_segments=2, steps=10)
    FlowAveraging(make_problem(graph, profile), deadline_s, forced=False).prices(1)
    for point in entry_points(group="gpuenergyd.kernels"):
        point.load()(graph, profile, solved)


def prepare_kernels(announce: Callable[[str], None]) -> str | None:
    """Compile all kernels or load them from the cache, once per process, so that no plan waits for it.

    A compilation is announced. Returns a message if no folder can cache the compiled kernels.
    """
    if not IS_COMPILED:
        return None
    COMPILE_CLOCK.announce = announce
    _compile_once()
    return None if cache_folder() is not None else NO_CACHE_FOLDER


_compile_once = cache(compile_kernels)


def main() -> int:
    """Compile the kernels, and print the folder and the time taken."""
    if not IS_COMPILED:
        sys.stdout.write("numba is not installed or is disabled: the planner runs as plain Python\n")
        return 0
    began_s = time.monotonic()
    compile_kernels()
    folder = cache_folder()
    place = "in memory only" if folder is None else f"in {folder}"
    sys.stdout.write(f"planner compiled in {time.monotonic() - began_s:.1f} s, {place}\n")
    if folder is None:
        sys.stderr.write(f"{NO_CACHE_FOLDER}\n")
    return 0 if folder is not None else 1


if __name__ == "__main__":
    sys.exit(main())
