"""How kernels are launched, recorded, bound, and given many units at a time."""
