"""Entry point of the demo in virtual time: replaces clocks, threads and processes before anything else is imported.

python -m gpuenergyd_sim.demo.virtual_main FOLDER
"""

import os
import signal
import sys
import time
from pathlib import Path

from gpuenergyd_sim.virtual_time.install import install
from gpuenergyd_sim.virtual_time.kernel import VirtualKernel

_BOOTED_FOR_NS = 3_600_000_000_000
"""Virtual monotonic clock at the start; the same in each run, since the phases of counters depend on it."""
_HOUR_S = 3600


def main() -> None:
    """Run the demo and end this process."""
    # As in the policy host, linear algebra threads only cost CPU time. numpy reads these variables at its import.
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    set_handler, real_mono_ns = signal.signal, time.monotonic_ns
    # A full hour, so that minutes and hours of the history begin at the same iteration in every run.
    utc_s = int(time.time()) // _HOUR_S * _HOUR_S - _HOUR_S
    kernel = VirtualKernel(mono_ns=_BOOTED_FOR_NS, utc_ns=utc_s * 1_000_000_000)
    install(kernel)
    from gpuenergyd_sim.demo.virtual_host import run_demo  # noqa: PLC0415  after the replacements

    process = kernel.start_process("demo", lambda: run_demo(kernel, Path(sys.argv[1]), real_mono_ns=real_mono_ns))
    set_handler(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))  # everything ends with this process
    kernel.run_until(process)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(process.exit_status or 0)  # waiting tasks never end


if __name__ == "__main__":
    main()
