"""The chapter parity."""
