"""The variants, by what they are variants of."""
