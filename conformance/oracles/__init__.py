"""Expected answers that do not share the fault of the thing under test."""
