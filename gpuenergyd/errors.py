"""All exceptions that gpuenergyd raises on purpose, in one tree, each with its command's exit code."""


class GpuEnergyError(Exception):
    """Base class: an error that the user can act on; the message is one line and says what is valid.

    GpuEnergyError                exit 1
    ├── UsageError                exit 2   invalid options or files
    │   ├── ProfileError          invalid profile or instance file
    │   ├── ScheduleError         order of instructions that cannot run
    │   ├── TargetError           iteration time target that cannot be met
    │   ├── CarbonDataError       invalid trace, frontier or option of a carbon command
    │   └── UnknownPolicyError    policy that is not installed
    ├── ProtocolError             message that violates the protocol
    ├── PlanError                 plan that does not fit its pipeline or its GPUs
    ├── JobError                  event that is not allowed in the current state of a job
    ├── AccessError               caller without permission
    ├── GpuError                  error of a GPU or its driver
    │   ├── GpuNotFoundError      no GPU with this UUID
    │   ├── GpuPermissionError    process without permission to change the GPU
    │   ├── GpuLostError          GPU that fell off the bus or needs a reset
    │   ├── GpuUnsupportedError   operation that this GPU does not support
    │   └── DriverError           missing, broken or misbehaving driver
    ├── JournalError              unreadable or unwritable restore journal
    ├── CarbonSourceError         carbon source that returned no usable value
    ├── StoreError                unreadable or unwritable history
    └── DaemonNotRunningError     exit 3   no daemon answers on the socket
    """

    exit_code = 1


class UsageError(GpuEnergyError):
    """Invalid options or files."""

    exit_code = 2


class ProfileError(UsageError):
    """Invalid profile or instance file."""


class ScheduleError(UsageError):
    """Order of instructions that cannot run."""


class TargetError(UsageError):
    """Iteration time target that cannot be met."""


class CarbonDataError(UsageError):
    """Invalid trace, frontier or option of a carbon command."""


class UnknownPolicyError(UsageError):
    """Policy that is not installed."""


class ProtocolError(GpuEnergyError):
    """Message that violates the protocol."""


class PlanError(GpuEnergyError):
    """Plan that does not fit its pipeline or its GPUs."""


class JobError(GpuEnergyError):
    """Event that is not allowed in the current state of a job."""


class AccessError(GpuEnergyError):
    """Caller without permission; the message names who has it and how to get it."""


class GpuError(GpuEnergyError):
    """Error of a GPU or its driver."""


class GpuNotFoundError(GpuError):
    """No GPU with this UUID."""


class GpuPermissionError(GpuError):
    """Process without permission to change the GPU."""


class GpuLostError(GpuError):
    """GPU that fell off the bus or needs a reset."""


class GpuUnsupportedError(GpuError):
    """Operation that this GPU does not support."""


class DriverError(GpuError):
    """Missing, broken or misbehaving driver."""


class JournalError(GpuEnergyError):
    """Unreadable or unwritable restore journal."""


class CarbonSourceError(GpuEnergyError):
    """Carbon source that returned no usable value."""


class StoreError(GpuEnergyError):
    """Unreadable or unwritable history."""


class DaemonNotRunningError(GpuEnergyError):
    """No daemon answers on the socket."""

    exit_code = 3
