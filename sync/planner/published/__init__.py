"""Policies of published systems, and closed forms of their papers."""
