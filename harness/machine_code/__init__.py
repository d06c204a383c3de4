"""The machine code of kernels, without a GPU: compilation ahead of time, instructions, busy pipes."""
