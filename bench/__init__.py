"""Measurements, and what they are made of; each is run as a module from the root of the checkout."""
