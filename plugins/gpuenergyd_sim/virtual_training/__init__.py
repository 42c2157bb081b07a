"""A training in virtual time: the daemon's job and a policy control a pipeline whose times are computed."""
