"""Front ends: the ways in which gradients come from a model, and the checks before anything is built."""
