"""What a proof claims, its raw data and its verdict, without I/O; `verdict` turns raw data into a conclusion."""
