"""The chapter region."""
