"""The chapter numerics."""
