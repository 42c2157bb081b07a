"""The demo's ranks as virtual processes, which exchange tensors in memory and wait for each other in virtual time."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, distributed_c10d  # type: ignore[attr-defined]  # public, not re-exported

from gpuenergyd_sim.driver.stream_signals import StreamSignals
from gpuenergyd_sim.training.gpt import parse_options, train
from gpuenergyd_sim.virtual_time.kernel import Process, VirtualKernel, Wait

_BACKEND = "virtual"
_BROADCAST = -1
"""The tag of broadcasts."""
Key = TypeVar("Key")


class Waits(Generic[Key]):
    """Tasks that wait until another task wakes them: a first-in, first-out queue for each key."""

    def __init__(self, kernel: VirtualKernel) -> None:
        self._kernel = kernel
        self._waits: dict[Key, deque[Wait]] = {}

    def wait(self, key: Key, *, limit_s: float | None = None) -> None:
        """Wait until a `wake` with this key, at most `limit_s`."""
        wait = self._kernel.new_wait()
        self._waits.setdefault(key, deque()).append(wait)
        self._kernel.await_wait(wait, until_ns=self._kernel.deadline_ns(limit_s))

    def wake(self, key: Key) -> None:
        """Wake the task that has waited longest."""
        waits = self._waits.get(key)
        while waits and not self._kernel.wake(waits.popleft(), None):
            pass


class Exchange:
    """The tensors that ranks of one training have sent and not yet received."""

    def __init__(self, kernel: VirtualKernel) -> None:
        self._sent: dict[Way, deque[torch.Tensor]] = {}
        self._waits: Waits[Way] = Waits(kernel)

    def send(self, way: "Way", tensor: torch.Tensor) -> None:
        self._sent.setdefault(way, deque()).append(tensor.detach().clone())
        self._waits.wake(way)

    def receive(self, way: "Way", tensor: torch.Tensor) -> None:
        """Wait for the next tensor with this sender, receiver and tag, and copy it into `tensor`."""
        while not self._sent.get(way):
            self._waits.wait(way)
        with torch.no_grad():
            tensor.copy_(self._sent[way].popleft())


class VirtualSignals(StreamSignals):
    """Signals between streams that wake their receiver, which therefore need not poll."""

    def __init__(self, path: Path, num_channels: int, waits: Waits[int]) -> None:
        super().__init__(path, num_channels)
        self._waits = waits

    def send(self, channel: int, mono_ns: int) -> None:
        """Send the next signal of a channel, with this time, and wake its receiver."""
        super().send(channel, mono_ns)
        self._waits.wake(channel)

    def pause(
        self,
        channel: int,
        number: int,  # noqa: ARG002  the receiver checks it
        *,
        limit_s: float,
        sleep: Callable[[float], None],  # noqa: ARG002  it is woken instead
    ) -> None:
        """Wait for the next signal of a channel, at most `limit_s`."""
        self._waits.wait(channel, limit_s=limit_s)


class Way(NamedTuple):
    """Sender, receiver and tag of a message."""

    source: int
    target: int
    tag: int


class _Sent(dist.Work):
    """The work of a send, which is complete from the start."""

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002  as torch has it
        return True


class _Receive(dist.Work):
    """The work of a posted receive."""

    def __init__(self, exchange: Exchange, way: Way, tensor: torch.Tensor) -> None:
        super().__init__()
        self._exchange, self._way = exchange, way
        self._tensor: torch.Tensor | None = tensor

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002  as torch has it
        tensor, self._tensor = self._tensor, None
        if tensor is not None:
            self._exchange.receive(self._way, tensor)
        return True


class VirtualGroup(dist.ProcessGroup):
    """A process group of virtual processes, with point-to-point messages and broadcasts."""

    def __init__(self, exchange: Exchange, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # as groups written in Python do
        self._exchange, self._rank, self._size = exchange, rank, size

    def getBackendName(self) -> str:  # noqa: N802  as torch has it
        return _BACKEND

    def send(self, tensors: Sequence[torch.Tensor], dstRank: int, tag: int) -> dist.Work:  # noqa: N803  torch's name
        self._exchange.send(Way(self._rank, dstRank, tag), tensors[0])
        return _Sent()

    def recv(self, tensors: Sequence[torch.Tensor], srcRank: int, tag: int) -> dist.Work:  # noqa: N803  torch's name
        """Post a receive."""
        return _Receive(self._exchange, Way(srcRank, self._rank, tag), tensors[0])

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> dist.Work:  # type: ignore[override]  # torch calls this form
        """Send the tensor of one rank to all others."""
        root = options.rootRank
        if self._rank != root:
            return _Receive(self._exchange, Way(root, self._rank, _BROADCAST), tensors[0])
        for rank in range(self._size):
            if rank != root:
                self._exchange.send(Way(root, rank, _BROADCAST), tensors[0])
        return _Sent()


class Ranks:
    """All ranks of a training, each a virtual process with its own state of torch.distributed."""

    def __init__(self, kernel: VirtualKernel, arguments: Sequence[str]) -> None:
        """Start the ranks with the arguments of the demo's training program."""
        torch.set_num_threads(1)
        options = parse_options(arguments)
        self._stop_fd: int = options.stop_fd
        exchange, store = Exchange(kernel), HashStore()
        open_signals = partial(VirtualSignals, waits=Waits(kernel))
        kernel.add_own_attribute(distributed_c10d, "_world", distributed_c10d._World)  # noqa: SLF001  the module's state
        dist.Backend.register_backend(
            _BACKEND, lambda _store, rank, size, _timeout: VirtualGroup(exchange, rank, size), devices=["cpu"]
        )

        def run(rank: int) -> None:
            dist.init_process_group(_BACKEND, store=store, rank=rank, world_size=options.stages)
            # No rank destroys its group: that would destroy the groups of all ranks. They end with this OS process.
            with ExitStack() as cleanup:
                train(options, rank, cleanup, open_signals=open_signals)

        self.processes: tuple[Process, ...] = tuple(
            kernel.start_process(f"rank-{rank}", partial(run, rank)) for rank in range(options.stages)
        )

    def stop(self) -> None:
        """Make all ranks stop after the same iteration."""
        os.write(self._stop_fd, b"stop")
