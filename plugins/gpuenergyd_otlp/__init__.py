"""Plugin `otlp`: the daemon's metrics for Prometheus, at `/v1/metrics`, and for OpenTelemetry collectors."""

from gpuenergyd.cli.command_entry import CommandEntry

OTLP = CommandEntry("Monitor", "gpuenergyd_otlp.command", "Export metrics to OpenTelemetry.")
