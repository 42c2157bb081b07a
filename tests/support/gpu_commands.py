"""Commands of an administrator for the command driver, which change simulated GPUs; each may misbehave."""

import sys
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = """#!{python} -IS
import os
import sys
sys.path[:0] = [{root!r}, {root!r} + "/plugins"]
from gpuenergyd_sim.driver.host import SimulatedHost
from pathlib import Path

name, uuid = sys.argv[1:3]
with Path({folder!r}, name + ".calls").open("a") as calls:
    calls.write(".")
Path({folder!r}, name + ".pid").write_text(str(os.getpid()))
behaviour = Path({folder!r}, name + ".behaviour")
behaviour = behaviour.read_text() if behaviour.exists() else "works"
if behaviour == "flaky":
    # A reset without effect shows when its GPU computes next, and the kill matrix does not wait for that: no such lies.
    kinds = ["fails", "hangs", "fails after setting", "hangs after setting", "dies after setting", "lies"]
    drawn = os.urandom(1)[0] % 32
    behaviour = kinds[drawn] if drawn < len(kinds) - (name == "reset") else "works"
if behaviour == "fails":
    sys.exit("no permission for " + uuid)
if behaviour == "hangs":
    import time
    time.sleep(600)
if behaviour != "lies":
    host = SimulatedHost.open({world!r})
    if name == "lock":
        host.lock_sm_clock(uuid, int(sys.argv[3]))
    elif name == "reset":
        host.reset_sm_clock(uuid)
    else:
        host.set_power_limit(uuid, float(sys.argv[3]))
if behaviour == "fails after setting":
    sys.exit(3)
if behaviour == "hangs after setting":
    import time
    time.sleep(600)
if behaviour == "dies after setting":
    import signal
    os.kill(os.getpid(), signal.SIGKILL)
"""


@dataclass(frozen=True, slots=True)
class GpuCommands:
    """A commands file in a folder, with one program for all commands."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, world_path: Path, *, timeout_s: float = 20.0) -> "GpuCommands":
        """Write the program and the commands file for the simulated GPUs in a world file."""
        folder.mkdir(parents=True, exist_ok=True)
        program = folder / "gpu-command"
        text = _PROGRAM.format(python=sys.executable, root=str(_ROOT), folder=str(folder), world=str(world_path))
        program.write_text(text)
        program.chmod(0o755)
        made = cls(folder)
        made.path.write_text(
            f'lock = ["{program}", "lock", "{{gpu_uuid}}", "{{sm_clock_mhz}}"]\n'
            f'reset = ["{program}", "reset", "{{gpu_uuid}}"]\n'
            f'limit = ["{program}", "limit", "{{gpu_uuid}}", "{{power_limit_w}}"]\n'
            f'timeout_s = {timeout_s}\nreader = "simulated"\nworld = "{world_path}"\n'
        )
        made.path.chmod(0o644)
        return made

    @property
    def path(self) -> Path:
        return self.folder / "commands.toml"

    def num_calls(self, name: str) -> int:
        """Return how often a command was run."""
        calls = self.folder / f"{name}.calls"
        return calls.stat().st_size if calls.exists() else 0

    def is_running(self, name: str) -> bool:
        """Return whether the latest run of a command has not ended yet."""
        return Path("/proc", (self.folder / f"{name}.pid").read_text()).exists()

    def let(self, name: str, behaviour: str) -> None:
        """Let a command misbehave from now on; `works` ends that, `flaky` misbehaves in every sixth call."""
        (self.folder / f"{name}.behaviour").write_text(behaviour)
