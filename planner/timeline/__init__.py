"""Prices of stages, and the timeline of a step that follows from them."""
