"""The emulated card, the simulated cards, and fakes of CUDA and NVML."""
