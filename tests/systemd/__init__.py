"""Tests of the systemd units and the installation."""
