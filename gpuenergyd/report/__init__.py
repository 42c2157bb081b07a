"""What happened, for people and for scripts: from the history to tables, JSON, CSV and one HTML page.

figures    how numbers are written
job        all that a report says of one job, read from the history once
groups     energy by user, by tag, by GPU or by day
energy_use what was used, measured, estimated and missing apart; tariff, what a kilowatt-hour costs at which hour
critical   which of the observed instructions the iteration waited for
colours    SM clocks as colours, ordered by eye
timeline   the pipeline before and after, drawn to one time scale
plane      time against energy of every plan, with the proven bound
power      power of a job's GPUs over time, against what plans predict
intensity  carbon intensity over a job's time with the iteration time that was owed
days       energy of all GPUs per day
axes       round steps and ticks
series     time and energy of every iteration, drawn in order
page       the HTML page
tables     the same for a terminal; csv_table, as CSV
live       what the daemon is doing now, for a terminal; screen, in as many lines as there are
"""
