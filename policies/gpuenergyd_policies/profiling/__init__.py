"""From a running job to its profile.

procedure  what to try next, and when to stop: regret says how much a plan from the present fit may lose
design     which clocks to try, so that few iterations tell forward and backward apart
times      from those iterations to time at every clock
fit        from those iterations to energy at every clock: power by a formula, residual by what it misses
memory     what was learned earlier, where it still holds
rescaling  what a job showed before it changed, brought to its pace of now
"""
