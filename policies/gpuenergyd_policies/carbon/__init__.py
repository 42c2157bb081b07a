"""Carbon decisions: forecasts of intensities, and where to spend a slowdown budget.

budget            plans that spend a slowdown budget where it saves most
chase             chase's rule, as a baseline
error_correction  corrects a forecast by its last error
features          histories as features that are comparable between zones
forecast          the next 72 hours, with quantiles and a skill record
jobs              one job on one trace
pooled_prior      a forecast learned from other zones
recent_dynamics   an autoregression fitted to the last week
replay            past traces replayed without look-ahead
target            the target of one job from frontier, budget and forecast
timing_value      what choosing hours can save in a zone
zone_model        a ridge regression on the zone's own history
"""
