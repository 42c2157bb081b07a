"""Plugin `otlp`: exports the daemon's metrics to OpenTelemetry collectors."""

from gpuenergyd.cli.command_entry import CommandEntry

OTLP = CommandEntry("Monitor", "gpuenergyd_otlp.command", "Export metrics to OpenTelemetry.")
