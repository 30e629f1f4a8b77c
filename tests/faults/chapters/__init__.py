"""Faults written by hand, by the chapter that must catch them."""
