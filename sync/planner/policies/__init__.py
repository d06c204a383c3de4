"""Policies that are limits, starts or baselines for others."""
