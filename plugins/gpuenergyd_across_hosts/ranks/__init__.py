"""What training processes exchange between hosts, through the job's store."""
