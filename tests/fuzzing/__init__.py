"""Fuzzing of the readers: files that anybody may have written are read, or refused by a typed error."""
