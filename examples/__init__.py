"""Complete training scripts, run as modules from the root of the checkout."""
