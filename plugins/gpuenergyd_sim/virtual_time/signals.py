"""Signal handlers of virtual processes: each process has its own."""

import signal
from typing import Any

from gpuenergyd_sim.virtual_time.kernel import VirtualKernel


def install(kernel: VirtualKernel) -> None:
    """Replace the functions of `signal`; `Process.signal` delivers signals."""

    def set_handler(number: int, handler: Any) -> Any:
        handlers = kernel.current.process.signal_handlers
        before = handlers.get(number, signal.SIG_DFL)
        handlers[number] = handler
        return before

    def set_wakeup_fd(fd: int, **_: Any) -> int:
        process = kernel.current.process
        before, process.wakeup_fd = process.wakeup_fd, fd
        return before

    replaced: Any = signal
    replaced.signal = set_handler
    replaced.getsignal = lambda number: kernel.current.process.signal_handlers.get(number, signal.SIG_DFL)
    replaced.set_wakeup_fd = set_wakeup_fd
    replaced.siginterrupt = lambda number, flag: None  # noqa: ARG005  the signature of signal
