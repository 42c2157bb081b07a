"""Numbered schema revisions; a released revision is never changed."""
