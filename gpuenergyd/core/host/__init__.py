"""The host: facts about it and a diagnosis.

diagnosis  problems of a host and their fixes
facts      facts about a host that a diagnosis rests on
"""
