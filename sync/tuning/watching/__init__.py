"""Watches over a running plan: its errors, and the times of its steps."""
