"""The public entry points, and the tuning of plans while a training runs."""
