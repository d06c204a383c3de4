"""The wire format of patches: which elements of tensors changed, and by how many steps between bit patterns."""
