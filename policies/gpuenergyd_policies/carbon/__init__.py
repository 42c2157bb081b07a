"""Decisions about carbon: forecasts of intensities, and where to spend a slowdown budget.

forecast   what the intensity of the next hours will be, from the history seen so far
features   histories as numbers that mean the same in every zone
prior      what other zones taught, for zones with a short history
own        what a zone's own history teaches; local, what its last week does
error_memory  what a forecaster's last error says of its next ones
budget     exact plans over hours, and a controller that cannot overdraw its budget
chase      Chase's rule, as a baseline
jobs       one job on one trace, by any look-ahead
replay     a past trace lived again without look-ahead
worth      what timing can be worth in a zone, before anything is started
target     the receding-horizon target of one job
"""
