"""Measurement of machine profiles: collectives in trains, codecs with cold buffers, and the engine's own overheads.

It is written for CPUs and CUDA, where events and streams measure the work of the device. Nothing of it has been run on
a GPU.
"""
