"""Units and installation: checked by systemd itself."""
