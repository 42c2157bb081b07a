"""Writing the history: records, rows and the writer thread.

records        what is written, as frozen values
rows           records to rows, one statement per table
series_buffer  samples and seconds until a minute is full
writer         the thread that writes the history
"""
