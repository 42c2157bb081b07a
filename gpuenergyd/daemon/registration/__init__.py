"""Registration: what training processes send, validated, and their sessions.

length      the expected length of a job, validated
tags        tags of a job, validated
validation  registrations and reports, validated
"""
