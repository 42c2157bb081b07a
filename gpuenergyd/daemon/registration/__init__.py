"""Registration: what training processes send, validated, and their sessions.

length      the expected length of a job, validated
sessions    registered training processes, by token and pidfd
tags        tags of a job, validated
validation  registrations and reports, validated
"""
