"""A folder for each chapter: its contracts, its checks, and what it alone uses."""
