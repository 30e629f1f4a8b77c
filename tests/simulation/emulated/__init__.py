"""An emulated CUDA card: the dispatch keys, autocast and autograd of CUDA over the kernels of a CPU."""
