"""Plugin `doctor`: diagnoses a host, measures its GPUs, and has the daemon measure their switch latencies."""

from gpuenergyd.cli.command_entry import CommandEntry

_TASK = "Operate a host"
DOCTOR = CommandEntry(_TASK, "gpuenergyd_doctor.command", "Diagnose this host and suggest fixes.")
CALIBRATE = CommandEntry(_TASK, "gpuenergyd_doctor.calibration", "Measure how long clock changes of idle GPUs take.")
