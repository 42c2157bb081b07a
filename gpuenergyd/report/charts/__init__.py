"""Charts of the HTML report, as inline SVG.

axes              linear axes with round ticks
carbon_intensity  carbon intensity and iteration time target over time
colours           SM clocks as colours
daily_energy      energy per day
iterations        time and energy of every iteration
power             measured and predicted power over time
time_energy       energy against time, one point per plan
timeline          pipeline timelines before and after tuning
"""
