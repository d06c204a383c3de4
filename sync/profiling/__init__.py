"""Measurement of machine profiles: collectives in trains, codecs with cold buffers, and the engine's own overheads."""
