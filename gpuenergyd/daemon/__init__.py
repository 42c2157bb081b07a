"""The daemon: accepts training processes, measures, applies plans, records; and starts its helper processes."""
