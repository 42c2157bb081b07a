"""The domain: pipelines, profiles, plans, targets and the life of a job. Standard library only, no I/O, no clock.

pipeline     instructions, schedules and their dependency graph
schedules    schedules by name, those with chunks and split backwards among them
profile      measured time and energy of each kind of instruction at each SM clock
timeline     graph + durations -> start, end, slack, critical path, bubbles, energy
plan         an SM clock for every instruction, and the clock changes that bring it about
target       what performance is owed
telemetry    samples, counters, and what an iteration cost
observation  what one iteration showed: instruction times at clocks, energy per GPU
carbon       intensities and what they mean, forecasts, grams, what to believe when a source is silent
carbon_replay  what is asked of a replay of past traces and what it answers
policy       the plugin API: Protocols and the frozen views they get
messages     what happens to a job (events) and what shall be done about it (commands)
job          the life of one job as a pure state machine
host         what was looked up about a host that is to run the daemon
diagnosis    what is wrong with that host, and the fix
"""
