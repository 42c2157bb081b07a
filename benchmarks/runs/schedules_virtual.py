"""schedules.py in virtual time: daemon, GPU worker, policy host and ranks in one process, on one clock.

    python benchmarks/runs/schedules_virtual.py [--gpu-model h200] [--seed 7] [options of schedules.py]

Trainings, daemon and GPUs are those of schedules.py, and so are all figures. Computing takes no virtual time: savings
do not depend on the load of this host, and equal seeds have equal figures.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpuenergyd_sim.virtual_time.install import install
from gpuenergyd_sim.virtual_time.kernel import VirtualKernel

POLICY = "bubble-aware"
"""The default of daemons."""


def main() -> None:
    """Run the benchmark and end this process."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    kernel = VirtualKernel(mono_ns=3_600_000_000_000, utc_ns=1_800_000_000_000_000_000)
    install(kernel)
    import schedules  # noqa: PLC0415  after the replacements
    from virtual_place import virtual_place  # noqa: PLC0415

    from gpuenergyd_sim.demo.virtual_host import prepare_policy  # noqa: PLC0415

    def run() -> int:
        prepare_policy(kernel, POLICY, lambda text: print(text, file=sys.stderr))
        return schedules.main(virtual_place(kernel))

    benchmark = kernel.start_process("benchmark", run)
    kernel.run_until(benchmark)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(benchmark.exit_status or 0)  # tasks that wait never end


if __name__ == "__main__":
    main()
