"""Tests of `gpuenergyd.daemon.across_hosts`."""
