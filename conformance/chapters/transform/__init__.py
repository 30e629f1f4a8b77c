"""Checks that function transforms, new and old spellings, keep what autocast does to a program."""
