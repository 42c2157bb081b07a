"""Hand-over of running jobs from one daemon to the next, when it restarts.

file  the file that it reads them from
jobs  stores the running jobs, and resumes them
"""
