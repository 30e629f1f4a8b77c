"""The chapter speed."""
