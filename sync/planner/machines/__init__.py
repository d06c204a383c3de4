"""Machines: measured profiles, and descriptions of machines that one has not."""
