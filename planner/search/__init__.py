"""Searches for better drafts."""
