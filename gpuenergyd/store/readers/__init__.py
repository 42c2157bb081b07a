"""Readers of the history: SQLite without SQLAlchemy, anything else through it.

sqlalchemy  reads any other history through SQLAlchemy
sqlite      reads an SQLite history without SQLAlchemy
"""
