"""Reports and the live view for a terminal.

live    the current status of the daemon
screen  the live view in a screen of limited size
tables  jobs and groups as tables
"""
