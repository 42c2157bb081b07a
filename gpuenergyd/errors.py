"""Errors of this project, as one tree with the exit codes of the command line."""


class GpuEnergyError(Exception):
    """Base of all errors; the message is one line that names the cause, the value and what is valid.

    GpuEnergyError                exit 1
    ├── UsageError                exit 2   invalid arguments or input
    │   ├── ProfileError          invalid profile table or planner instance
    │   ├── ScheduleError         invalid schedule or dependency graph
    │   ├── TargetError           invalid or impossible iteration time target
    │   ├── CarbonDataError       invalid trace, frontier or carbon option
    │   └── UnknownPolicyError    policy that is not installed
    ├── ProtocolError             message that violates the protocol
    ├── PlanError                 plan that does not fit its pipeline or GPUs
    ├── JobError                  event that is invalid in the state of the job
    ├── AccessError               caller without permission
    ├── GpuError                  failure of a GPU or its driver
    │   ├── GpuNotFoundError      no GPU with that UUID
    │   ├── GpuPermissionError    no permission to change the GPU
    │   ├── GpuLostError          GPU fell off the bus or needs a reset
    │   ├── GpuUnsupportedError   operation not supported by this GPU
    │   └── DriverError           driver missing or broken, or invalid reply
    ├── JournalError              restore journal not readable or writable
    ├── CarbonSourceError         no usable value from a carbon source
    ├── StoreError                history database not readable or writable
    └── DaemonNotRunningError     exit 3   no daemon listens on the socket
    """

    exit_code = 1


class UsageError(GpuEnergyError):
    """Invalid arguments or input."""

    exit_code = 2


class ProfileError(UsageError):
    """Invalid profile table or planner instance."""


class ScheduleError(UsageError):
    """Invalid schedule or dependency graph."""


class TargetError(UsageError):
    """Invalid or impossible iteration time target."""


class CarbonDataError(UsageError):
    """Invalid trace, frontier or carbon option."""


class UnknownPolicyError(UsageError):
    """Policy that is not installed."""


class ProtocolError(GpuEnergyError):
    """Message that violates the protocol."""


class PlanError(GpuEnergyError):
    """Plan that does not fit its pipeline or GPUs."""


class JobError(GpuEnergyError):
    """Event that is invalid in the current state of the job."""


class AccessError(GpuEnergyError):
    """Caller without permission; the message says which user or group has it."""


class GpuError(GpuEnergyError):
    """Failure of a GPU or its driver."""


class GpuNotFoundError(GpuError):
    """No GPU with that UUID."""


class GpuPermissionError(GpuError):
    """No permission to change the GPU."""


class GpuLostError(GpuError):
    """GPU fell off the bus or needs a reset."""


class GpuUnsupportedError(GpuError):
    """Operation not supported by this GPU."""


class DriverError(GpuError):
    """Driver missing or broken, or it returned an invalid reply."""


class JournalError(GpuEnergyError):
    """Restore journal not readable or writable."""


class CarbonSourceError(GpuEnergyError):
    """No usable value from a carbon source."""


class StoreError(GpuEnergyError):
    """History database not readable or writable."""


class DaemonNotRunningError(GpuEnergyError):
    """No daemon listens on the socket."""

    exit_code = 3
