"""Launching, recording and binding of kernels, one unit or many units at a time."""
