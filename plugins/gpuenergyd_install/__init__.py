"""Plugin `install`: sets up the daemon as systemd services, and removes them."""

from gpuenergyd.cli.command_entry import CommandEntry

_TASK, _MODULE = "Set up a host", "gpuenergyd_install.command"
INSTALL = CommandEntry(_TASK, _MODULE, "Install the daemon as systemd services.")
UNINSTALL = CommandEntry(_TASK, _MODULE, "Stop and remove the systemd services.")
