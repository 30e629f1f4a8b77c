"""Contracts and checks of the public API of torch.amp."""
