"""The writer thread and how records become rows.

connection     opens the database for writing, replaces a corrupt file
record_queue   the bounded queue between the daemon and the writer thread
rows           converts records to rows, one statement per table
series_buffer  collects samples and one-second rollups until their minute is packed
writer         the writer thread
"""
