"""Carbon in the daemon: values, forecasts, targets and budgets of jobs that follow the grid.

account_file     slowdown accounts on disk
accounts         slowdown accounts of the jobs that follow the grid
budget           how much slowdown a job may still spend
feed             hourly intensities from the fetcher's or a signal file
fetcher_process  the fetcher as a child process
fetcher_unit     the carbon fetcher as a systemd unit
service          fetcher, values, forecasts and targets, put together
status           carbon fields of a job's status
target_view      what a target policy is shown of a job
targets          iteration-time targets of jobs that follow the grid
"""
