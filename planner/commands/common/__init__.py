"""Inputs, outcomes and tables that commands share."""
