"""What several tests share: fakes, deadlines, virtual time."""
