"""Operations of models: in torch, and in this package's kernels for CPUs."""
