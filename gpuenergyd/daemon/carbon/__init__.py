"""Carbon intensity in the daemon: readings and forecasts, and the targets and slowdown budgets of jobs.

account_file     slowdown accounts on disk, for the next daemon process
accounts         slowdown accounts and energy by hour of the running jobs
budget           remaining slowdown budget of a job
feed             hourly intensities from the fetcher's file or a signal file
fetcher_process  the carbon fetcher as a child process
fetcher_unit     main program of the carbon fetcher's systemd unit
service          fetcher, intensities, forecasts and targets, put together
status           carbon fields of a job's status
target_view      input of target policies
targets          hourly iteration-time targets of the jobs
"""
