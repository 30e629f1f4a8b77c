"""A conformance suite for PyTorch automatic mixed precision: run it with `pytest conformance`."""
