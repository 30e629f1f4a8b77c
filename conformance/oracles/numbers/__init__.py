"""Number formats, exact arithmetic and derived error bounds."""
