"""What people read, and what makes a site of it."""
