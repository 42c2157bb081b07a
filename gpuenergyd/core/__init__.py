"""The domain: pipelines, measurements, plans and the life of a job. Standard library only, no I/O, no clock.

carbon         carbon: intensities, accounts and the slowdown budget
clock_request  the request for one GPU's SM clock, as it passes from the trainer to the driver
distributed    training on many GPUs: stragglers among replicas, and plans that ranks on several hosts follow together
host           the host: facts about it and a diagnosis
job            the life of one job: a pure state machine and what it consists of
measurement    measurements: from samples and reported intervals to observed iterations and attributed energy
pipeline       pipelines and plans: schedules, profiles, timelines and the SM clock of every instruction
policy_api     the plugin API that a policy author reads: Protocols, views and targets
"""
