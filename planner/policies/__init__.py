"""Policies: published systems, and limits, starts or baselines for others."""
