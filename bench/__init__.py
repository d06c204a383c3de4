"""Benchmarks and the modules that they share; run each as a module (``python -m``) from the root of the checkout."""
