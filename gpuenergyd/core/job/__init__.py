"""The life of one job: a pure state machine and its parts."""
