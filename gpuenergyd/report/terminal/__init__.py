"""Reports and the live view for a terminal.

live    the daemon's current state
screen  the live view fitted to a screen
tables  jobs and groups as tables
"""
