"""The domain: pipelines, measurements, plans and the life of a job. Standard library only, no I/O, no clock."""
