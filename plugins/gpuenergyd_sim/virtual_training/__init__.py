"""A training in virtual time: the daemon's job and a policy around a pipeline that is arithmetic, in one process."""
