"""What happened, for people and for scripts: from the history to tables, JSON, CSV and one HTML page.

figures    how numbers are written
savings    how sure a saving is: the interval around a ratio of medians
job        all that a report says of one job, read from the history once
critical   which of the observed instructions the iteration waited for
colours    SM clocks as colours, ordered by eye
timeline   the pipeline before and after, drawn to one time scale
series     time and energy of every iteration, drawn in order
page       the HTML page
tables     the same for a terminal, as CSV and as JSON
live       what the daemon is doing now, for a terminal
"""
