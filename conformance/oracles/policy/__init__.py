"""The op lists, their overloads, and calls that reach each of them."""
