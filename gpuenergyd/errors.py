"""Every error this project raises on purpose, in one tree, each with the exit code its command ends with."""


class GpuEnergyError(Exception):
    """Something went wrong that the user can act on; the message is one line and says what is valid.

    GpuEnergyError                exit 1
    ├── UsageError                exit 2   what was asked for makes no sense as written
    │   ├── ProfileError          a profile or instance file that cannot be used
    │   ├── ScheduleError         an order of instructions that cannot run
    │   ├── TargetError           an iteration time that cannot be owed
    │   ├── CarbonDataError       a trace, frontier or option of a carbon command that cannot be used
    │   └── UnknownPolicyError    a policy that is not installed
    ├── ProtocolError             a message that breaks the wire contract
    ├── PlanError                 a plan that does not fit its pipeline or its GPUs
    ├── JobError                  an event that this job cannot take now
    ├── AccessError               somebody who may not do that
    ├── GpuError                  a GPU or its driver
    │   ├── GpuNotFoundError      no GPU with that UUID
    │   ├── GpuPermissionError    this process may not change the GPU
    │   ├── GpuLostError          the GPU fell off the bus or needs a reset
    │   ├── GpuUnsupportedError   this GPU cannot do that, and never will
    │   └── DriverError           the driver is missing, broken or answers nonsense
    ├── JournalError              the restore journal cannot be read or written
    ├── CarbonSourceError         a source of carbon intensities that gave no usable value
    ├── StoreError                the history cannot be read or written
    └── DaemonNotRunningError     exit 3
    """

    exit_code = 1


class UsageError(GpuEnergyError):
    """What was asked for makes no sense as written."""

    exit_code = 2


class ProfileError(UsageError):
    """A profile or instance file that cannot be used."""


class ScheduleError(UsageError):
    """An order of instructions that cannot run."""


class TargetError(UsageError):
    """An iteration time that cannot be owed."""


class CarbonDataError(UsageError):
    """A trace, frontier or option of a carbon command that cannot be used."""


class UnknownPolicyError(UsageError):
    """A policy that is not installed."""


class ProtocolError(GpuEnergyError):
    """A message that breaks the wire contract."""


class PlanError(GpuEnergyError):
    """A plan that does not fit its pipeline or its GPUs."""


class JobError(GpuEnergyError):
    """An event that this job cannot take now."""


class AccessError(GpuEnergyError):
    """Somebody who may not do that; the message says who may, and how to become one."""


class GpuError(GpuEnergyError):
    """A GPU or its driver."""


class GpuNotFoundError(GpuError):
    """No GPU with that UUID."""


class GpuPermissionError(GpuError):
    """This process may not change the GPU."""


class GpuLostError(GpuError):
    """The GPU fell off the bus or needs a reset."""


class GpuUnsupportedError(GpuError):
    """This GPU cannot do that, and never will."""


class DriverError(GpuError):
    """The driver is missing, broken or answers nonsense."""


class JournalError(GpuEnergyError):
    """The restore journal cannot be read or written."""


class CarbonSourceError(GpuEnergyError):
    """A source of carbon intensities that gave no usable value."""


class StoreError(GpuEnergyError):
    """The history cannot be read or written."""


class DaemonNotRunningError(GpuEnergyError):
    """Nobody answers on the daemon's socket."""

    exit_code = 3
