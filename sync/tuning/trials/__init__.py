"""Trials of plans in real steps, and the rules of which plans may be tried."""
