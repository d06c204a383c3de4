"""Measurements of collectives, codecs, copies and overheads, and fits to them."""
