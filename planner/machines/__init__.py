"""Machines: measured profiles, and descriptions of machines that you do not have."""
