"""Carbon decisions: forecasts of intensities, and where to spend a slowdown budget.

budget            optimal spending of a slowdown budget over hours
chase             the rule of Chase, for comparison
error_correction  correction of a forecast by its last error
features          features of histories that are comparable between zones
forecast          forecasts of the next 72 hours, with quantiles and skill
jobs              emissions of one job on one trace
pooled_prior      a forecast model trained on many zones
recent_dynamics   an autoregression fitted to the last week
replay            replay of past traces without look-ahead
target            the target of one job from frontier, budget and forecast
timing_value      the saving that a choice of hours allows in a zone
zone_model        a ridge regression on the zone's own history
"""
