"""Watches over a running plan: its errors, and the drift of its steps."""
