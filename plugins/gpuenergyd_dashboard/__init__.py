"""Plugin `dashboard`: a live web page of the daemon's host."""

from gpuenergyd.cli.command_entry import CommandEntry

DASHBOARD = CommandEntry("Monitor", "gpuenergyd_dashboard.command", "Serve a live web page on 127.0.0.1.")
